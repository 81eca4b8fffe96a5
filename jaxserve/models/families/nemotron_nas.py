"""Llama-Nemotron Super 49B and Ultra 253B (arXiv 2505.00949), whose layers an architecture search chose (arXiv 2411.19146).

transformers has no class: tests compare with a Llama that has zeros in the place of what layers lack, and copies of KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import HEADS, KV_HEADS, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.per_layer import by_layer
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_HEADS, MAX_WIDTH, build, num_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(COMMON_DEFAULTS, head_dim=None, attention_bias=False, mlp_bias=False)
_BLOCKS: Final = "block_configs"
_MULTIPLE: Final = 256
"""Widths of feed-forward blocks are multiples of this number."""
_GGUF_WIDTH: Final = "feed_forward_length"
_POSITIONS: Final = "position_embedding_type"
_ADJACENT: Final = ("mistral_yarn", "rope_llama4")
"""Kinds of positions that rotate adjacent numbers."""
_PLAIN: Final[Mapping[str, tuple[object, ...]]] = {
    "replace_with_linear": (False, None),
    "sparsify": (None, []),
    "num_sink_tokens": (None,),
    "window_length": (None,),
    "unshifted_sink": (False, None),
    "use_prefill_window_in_sink_attention": (False, None),
    "llama4": (None,),
    "mamba": (None,),
    "moe": (None,),
    "gated": (True, None),
    "hidden_act": ("silu", None),
}
"""Values that are computed, of further keys of a block."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of the checkpoint that has attention, a feed-forward block or both."""

    number: int
    """Its number in the checkpoint, which counts layers without blocks, too."""
    num_kv_heads: int | None
    """None: it has no attention."""
    intermediate_size: int | None
    """None: it has no feed-forward block."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with KV heads and widths by layer, some layers without attention or without a feed-forward block.

    Layers without either are left out.
    """
    keys = Keys({**DEFAULTS, **hf})
    if keys.get(_POSITIONS) in _ADJACENT:
        raise keys.error(_POSITIONS, "rope")
    layers = [*_layers(keys)]
    kv_heads = [layer.num_kv_heads for layer in layers if layer.num_kv_heads is not None]
    widths = [layer.intermediate_size for layer in layers if layer.intermediate_size is not None]
    if not kv_heads or not widths:
        raise keys.error(_BLOCKS, "a layer with attention and one with a feed-forward block")
    table = {**keys.table, "num_key_value_heads": kv_heads[0], "intermediate_size": widths[0]}
    own = tuple(
        LayerConfig(
            intermediate_size=layer.intermediate_size,
            num_kv_heads=layer.num_kv_heads,
            has_kv=layer.num_kv_heads is not None,
            has_mlp=layer.intermediate_size is not None,
        )
        for layer in layers
    )
    return build(replace(keys, table=table), layers=own, computed=("mlp_bias",))


def _layers(keys: Keys) -> Iterator[_Layer]:
    count, blocks = num_layers(keys), keys.get(_BLOCKS)
    if not isinstance(blocks, list) or len(blocks) != count or not all(isinstance(block, dict) for block in blocks):
        raise keys.error(_BLOCKS, f"a list of tables, one for each of the {count} layers")
    for number, block in enumerate(blocks):
        prefix = f"{_BLOCKS}[{number}]."
        layer = _Layer(
            number,
            _kv_heads(keys, _block(keys, block, "attention", prefix)),
            _width(keys, _block(keys, block, "ffn", prefix)),
        )
        if layer.num_kv_heads is not None or layer.intermediate_size is not None:
            yield layer


def _block(keys: Keys, block: Mapping[str, Any], name: str, prefix: str) -> Keys | None:
    """Return the keys of an attention or feed-forward block; None if the layer has none."""
    table = block.get(name)
    if not isinstance(table, dict):
        raise keys.error(_BLOCKS, f"a table {name} in each layer")
    own = Keys({"no_op": False, **table}, f"{prefix}{name}.")
    if own.flag("no_op"):
        return None
    for key, accepted in _PLAIN.items():
        own.require(key, *accepted)
    return own


def _kv_heads(keys: Keys, own: Keys | None) -> int | None:
    if own is None:
        return None
    heads = keys.integer("num_attention_heads", MAX_HEADS)
    group = own.integer("n_heads_in_group", heads)
    if heads % group:
        raise own.error("n_heads_in_group", f"a divisor of num_attention_heads ({heads})")
    return heads // group


def _width(keys: Keys, own: Keys | None) -> int | None:
    """Return a width: `intermediate_size`, or two thirds of `ffn_mult` times the model's, rounded up."""
    if own is None:
        return None
    if own.get("intermediate_size") is not None:
        return own.integer("intermediate_size", MAX_WIDTH)
    width = int(2 * own.number("ffn_mult", high=1024) * keys.integer("hidden_size", MAX_WIDTH) / 3)
    return -(-width // _MULTIPLE) * _MULTIPLE


def _names(hf: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our names of layers after one that is left out."""
    kept = enumerate(_layers(Keys({**DEFAULTS, **hf})))
    moved = {layer.number: index for index, layer in kept if layer.number != index}
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    return {f"layers.{old}.{part}": f"layers.{new}.{part}" for old, new in moved.items() for part in parts}


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks of each layer. A layer that has query heads alone has a matrix in the place of attention, which is not computed."""
    lists = (by_layer(keys, key, config["num_hidden_layers"], minimum=0) for key in (HEADS, KV_HEADS, _GGUF_WIDTH))
    blocks, num_heads = list[dict[str, Any]](), config["num_attention_heads"]
    for heads, kv_heads, width in zip(*lists, strict=True):
        if heads != (num_heads if kv_heads else 0) or (kv_heads and heads % kv_heads):
            keys.fail(KV_HEADS, f"divisors of {num_heads} beside {num_heads} query heads, or 0 beside 0", kv_heads)
        attention = {"no_op": not kv_heads, "n_heads_in_group": num_heads // kv_heads if kv_heads else None}
        blocks.append({"attention": attention, "ffn": {"no_op": not width, "intermediate_size": width or None}})
    return {**no_window(keys, config), _BLOCKS: blocks}


FAMILY = Family(
    ("DeciLMForCausalLM",),
    decoder_config,
    config_renames=_names,
    gguf=GGUFArchitecture(
        "deci",
        is_rope_permuted=True,
        has_bias_flags=True,
        varies_by_layer=True,
        lacks_blocks=True,
        renames=_names,
        config=_gguf_config,
    ),
)
