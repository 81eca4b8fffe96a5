"""A family's GGUF files: llama.cpp's names for a decoder's tensors, and metadata under the prefix of one architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

import numpy as np

from jaxserve.checkpoint.gguf.file import GGUFFile
from jaxserve.errors import CheckpointError, shown

LOG_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"
HEADS: Final = "attention.head_count"
KV_HEADS: Final = "attention.head_count_kv"
WINDOW: Final = "attention.sliding_window"
CLIP: Final = "attention.clamp_kqv"
WINDOW_PATTERN: Final = "attention.sliding_window_pattern"
SECTIONS: Final = "rope.dimension_sections"
SLIDING_THETA: Final = "rope.freq_base_swa"
RMS_NORM_EPS: Final = "rms_norm_eps"
"""Key of `config.json` for the epsilon of RMSNorm."""

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

POST_NORMS: Final[Mapping[str, str]] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""`tensor_names` of a decoder with norms after its blocks."""
SANDWICH_NORMS: Final[Mapping[str, str]] = {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
"""`tensor_names` of a decoder with norms before and after its blocks."""

LAYER_NORM_NAMES: Final[Mapping[str, str]] = {"output_norm.bias": "model.norm.bias"}
"""`top_names` of a decoder whose norms have biases."""

_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}
"""Parts of a layer with experts, under the decoder's own names. A tensor holds the matrices of all experts."""
SINKS: Final = "self_attn.sinks"
"""Name of attention sinks, which have no suffix."""
STACKED: Final = ".experts."
"""Part of the name of a tensor that holds the matrices of all experts."""

_BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z0-9_.]+?)(?:\.(weight|bias))?")
_JOINED_BY_UNDERSCORE: Final = (_EXPERTS["exp_probs_b"], "mamba.dt", "linear_attn.dt")
"""Parts whose `bias` is joined with an underscore."""
_WITHOUT_SUFFIX: Final = ("mamba.A_log", "mamba.D", "linear_attn.A_log", "router.scale", "router.per_expert_scale")
_BARE: Final = (SINKS, "layer_scalar", "altup.correct_output_scale")
"""Parts whose `weight` has no suffix in Hugging Face's names."""

ROPE_FACTORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"
NO_WEIGHTS = (ROPE_FACTORS, SHORT_DIVISORS, LONG_DIVISORS)
"""Tensors that hold divisors of rotary frequencies (see gguf/config.py), not weights."""


@dataclass(frozen=True, slots=True)
class GGUFKeys:
    """Metadata under the prefix of one architecture, each value checked for its type and range."""

    file: GGUFFile
    architecture: str

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = (1 << 31) - 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            self.fail(key, f"a whole number from {minimum} to {maximum}", value)
        return value

    def flag(self, key: str) -> bool:
        """Return a truth value; False if the file has none."""
        value = self._get(key, False)
        if not isinstance(value, bool):
            self.fail(key, "true or false", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number as a decimal: 1e-05, not 9.999999747378752e-06."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.fail(key, "a positive number", value)
        return float(decimal(float(value)))

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def fail(self, key: str, expected: str, found: Any) -> NoReturn:
        shown_found = "none" if found is None else shown(found) if isinstance(found, str) else str(found)[:80]
        raise CheckpointError(
            f"{self.file.path}: key '{self.architecture}.{key}': expected {expected}, found {shown_found}"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value


def decimal(value: Any) -> Any:
    """Return the shortest decimal of a number stored as float32, and any other value unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def split_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order: within a head, rows (0, h, 1, h+1, ...) become (0, 1, ..., h, h+1, ...).

    llama.cpp rotates adjacent rows, Hugging Face row i with row i + head_dim / 2.
    """
    pairs = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def no_window(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return no keys of its own for `config.json`; raise CheckpointError if the file has a sliding window."""
    if keys.get(WINDOW):
        keys.fail(WINDOW, "none for this architecture", keys.get(WINDOW))
    return {}


def no_sections(keys: GGUFKeys) -> None:
    """Raise CheckpointError if a token has several positions."""
    if keys.get(SECTIONS) not in (None, [0] * 4):
        keys.fail(SECTIONS, "none: one position per token", keys.get(SECTIONS))


def same_theta(keys: GGUFKeys, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if layers with a sliding window have a rope base of their own."""
    if keys.number(SLIDING_THETA, config["rope_theta"]) != config["rope_theta"]:
        keys.fail(SLIDING_THETA, "the base of all layers", keys.get(SLIDING_THETA))


def layer_types(keys: GGUFKeys, config: Mapping[str, Any], period: int) -> list[str]:
    """Return `layer_types` as the file lists them; by default the last of every `period` layers has full attention."""
    count, stored = config["num_hidden_layers"], keys.get(WINDOW_PATTERN)
    if isinstance(stored, list):
        stored = stored[:count]  # without those of multi-token-prediction layers
        if len(stored) != count or not all(is_windowed in (0, 1) for is_windowed in stored):
            keys.fail(WINDOW_PATTERN, f"true or false for each of the {count} layers", stored)
        is_sliding = stored
    else:
        period = keys.integer(WINDOW_PATTERN, period)
        is_sliding = [(layer + 1) % period != 0 for layer in range(count)]
    return ["sliding_attention" if is_windowed else "full_attention" for is_windowed in is_sliding]


def dense_layers(keys: GGUFKeys, config: Mapping[str, Any]) -> list[int]:
    """Return the layers without a router."""
    names = keys.file.tensors
    return [layer for layer in range(config["num_hidden_layers"]) if f"blk.{layer}.ffn_gate_inp.weight" not in names]


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """Storage of one family by llama.cpp."""

    name: str
    """`general.architecture`."""
    other_names: tuple[str, ...] = ()
    """Further values of `general.architecture`; their keys have them as prefixes."""
    is_rope_permuted: bool = False
    """True if the rows of q and k are reordered from Hugging Face's half-split rope to adjacent pairs."""
    has_bias_flags: bool = False
    """True if the family reads `attention_bias` and `mlp_bias`; they are set if the file has such tensors."""
    has_partial_rotary: bool = False
    """True if fewer dimensions than a head has may rotate."""
    has_mixers: bool = False
    """True if `attention.head_count_kv` is a list in which recurrent layers have 0, and the width of feed-forward blocks may be
    one, too: see gguf/mixers.py."""
    varies_by_layer: bool = False
    """True if heads, KV heads, the width of feed-forward blocks and rope may differ between layers: `config` reads them, see
    gguf/per_layer.py."""
    has_own_rope_factors: bool = False
    """True if `config` reads the factors of rope's frequencies (`rope_freqs.weight`); others are those of Llama 3."""
    has_attention: bool = True
    """False if all layers have mixers alone."""
    has_narrow_values: bool = False
    """True if values may have fewer numbers than keys: `config` reads how many."""
    has_latent_attention: bool = False
    """True if queries and keys have the sizes of latent attention: see gguf/latent.py."""
    eps_key: str | None = RMS_NORM_EPS
    """Key of `config.json` for the epsilon of norms; that of LayerNorm has another name, also in the file. None: `config` reads it."""
    norm_offset: float = 0.0
    """Offset that the file adds to norm weights, those of gated delta nets excepted."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face name by llama.cpp name, for parts of a layer that differ from Llama's."""
    renames: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    """Return our names of parts whose names depend on the config, as `Family.config_renames` does; None: there are none."""
    bare_parts: Mapping[str, str] = field(default_factory=dict)
    """Suffix by llama.cpp's name, for parts whose weights or biases files store without it."""
    top_names: Mapping[str, str] = field(default_factory=dict)
    """Hugging Face name by llama.cpp name, for tensors outside layers that differ from Llama's."""
    experts: Literal["none", "optional", "required"] = "none"
    """Experts of the files; optional: those of other families have the name of this architecture, too (Mixtral)."""
    width_key: str = "feed_forward_length"
    """Key with the width of feed-forward blocks; another one if no layer is dense."""
    attention_factor_keys: tuple[str, ...] = ()
    """Keys that may hold yarn's `attention_factor`; in other families they must be 1 or absent."""
    config: Callable[[GGUFKeys, Mapping[str, Any]], dict[str, Any]] = no_window
    """Return the keys of `config.json` that the family adds to, or replaces in, those common to all files."""
    lacks_blocks: bool = False
    """True if a layer that `varies_by_layer` may lack attention or its feed-forward block: its heads or its width are 0."""

    def hf_name(self, gguf_name: str, num_layers: int, *, has_experts: bool = False) -> str | None:
        """Return the Hugging Face name of a GGUF tensor; None if a decoder with that many layers has no such tensor.

        has_experts: True if the file has experts. Those of the matrices of all experts, and of sinks, have no suffix, as in checkpoints of gpt-oss.
        """
        top_name = self.top_names.get(gguf_name, _TOP_LEVEL.get(gguf_name))
        if top_name is not None:
            return top_name
        match = _BLOCK_NAME.fullmatch(gguf_name)
        if match is None or int(match[1]) >= num_layers:
            return None
        part = self.tensor_names.get(match[2], _PER_LAYER.get(match[2]))
        if part is None and has_experts:
            part = _EXPERTS.get(match[2])
        if part is None:
            return None
        suffix = match[3] or self.bare_parts.get(match[2])
        name = f"model.layers.{match[1]}.{part}"
        if (suffix is None) != (part in _WITHOUT_SUFFIX):
            return None
        if suffix is None:
            return name
        if STACKED in name or part in _JOINED_BY_UNDERSCORE:
            return name if suffix == "weight" else f"{name}_{suffix}"
        return name if part in _BARE and suffix == "weight" else f"{name}.{suffix}"
