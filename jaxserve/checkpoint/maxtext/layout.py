"""The declaration of a family's MaxText checkpoints, and the places of a decoder's tensors in them.

Names and shapes are those of MaxText's own converters (`checkpoint_conversion/` of github.com/AI-Hypercomputer/maxtext).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Role = Literal["query", "key", "value", "out", "matrix", "bias", "norm", "head_norm"]
"""Form of an array, without the axis of layers: query, key and value are (D, heads, H), out is (N, H, D), matrix (in, out),
bias (heads, H), norm (D), head_norm (H)."""

SANDWICH_NORM_NAMES: Final[Mapping[str, str]] = {
    "pre_self_attention_norm": "input_layernorm",
    "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""`norms` of a decoder with norms before and after its blocks."""
_PRE_NORMS: Final[Mapping[str, str]] = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}
_MODULES: Final[Mapping[str, tuple[str, Role]]] = {
    "self_attention.query.kernel": ("self_attn.q_proj.weight", "query"),
    "self_attention.key.kernel": ("self_attn.k_proj.weight", "key"),
    "self_attention.value.kernel": ("self_attn.v_proj.weight", "value"),
    "self_attention.out.kernel": ("self_attn.o_proj.weight", "out"),
    "self_attention.query.bias": ("self_attn.q_proj.bias", "bias"),
    "self_attention.key.bias": ("self_attn.k_proj.bias", "bias"),
    "self_attention.value.bias": ("self_attn.v_proj.bias", "bias"),
    "self_attention.query_norm.scale": ("self_attn.q_norm.weight", "head_norm"),
    "self_attention.key_norm.scale": ("self_attn.k_norm.weight", "head_norm"),
    "mlp.wi_0.kernel": ("mlp.gate_proj.weight", "matrix"),
    "mlp.wi_1.kernel": ("mlp.up_proj.weight", "matrix"),
    "mlp.wo.kernel": ("mlp.down_proj.weight", "matrix"),
}


@dataclass(frozen=True, slots=True)
class MaxTextLayout:
    """MaxText's checkpoints of one family of decoders."""

    norms: Mapping[str, str] = field(default_factory=lambda: _PRE_NORMS)
    """Our name by MaxText's, for the norms of a layer."""
    norm_offset: float = 0.0
    """Number that MaxText adds to the weights of norms."""
    query_scale: Literal["head_dim", "query_pre_attn_scalar"] | None = None
    """Value whose square root divides the stored queries; None: they are stored as they are."""
    embedding_divisor: Literal["float32", "bfloat16"] | None = None
    """Embeddings are stored times sqrt(D), rounded to this dtype; None: as they are."""
    pair: tuple[str, ...] = ("",)
    """Suffixes of the modules of consecutive layers that MaxText counts as one."""
    cycle: int = 1
    """Layers of the block that is repeated if layers are stacked, each with its own arrays."""
    has_tied_logits: bool = True
    """False: MaxText scales the logits of tied embeddings, which is not computed."""

    def modules(self) -> dict[str, tuple[str, Role]]:
        """Return our name and the form of each array of a layer, by MaxText's path in the layer."""
        norms: dict[str, tuple[str, Role]] = {
            f"{mine}.scale": (f"{our}.weight", "norm") for mine, our in self.norms.items()
        }
        return {**_MODULES, **norms}

    def places(self, path: str, layer: int, num_layers: int) -> dict[str, int | None]:
        """Return the paths below `decoder` at which an array of a layer may be, each with its index among stacked layers.

        path: the array in a layer, as in `modules()`. None: layers are not stacked there.
        """
        first, _, rest = path.partition(".")
        path = f"{first}{self.pair[layer % len(self.pair)]}.{rest}"
        layer, num_layers = layer // len(self.pair), num_layers // len(self.pair)
        alone = {f"layers_{layer}.{path}": None}
        if self.cycle == 1:
            return {**alone, f"layers.{path}": layer}
        num_stacked = num_layers - num_layers % self.cycle
        if layer >= num_stacked:
            return {**alone, f"layers_remainder.layers_{layer - num_stacked}.{path}": None}
        return {**alone, f"layers.layers_{layer % self.cycle}.{path}": layer // self.cycle}

    def num_stacked(self, num_layers: int) -> int:
        """Return the length of the axis of layers."""
        return num_layers // len(self.pair) // self.cycle
