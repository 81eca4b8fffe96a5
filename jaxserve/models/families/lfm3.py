"""LFM3 and LFM3-VL: LFM2 with sliding windows, gated attention and sandwich norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import ShortConvConfig
from jaxserve.models.families import lfm2
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_HEAD_DIM, MAX_WIDTH, build, num_layers, read_window
from jaxserve.models.families._hybrid import MAX_TAPS, hybrid_layers, layer_names
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._lfm3_vl import lfm3_vl
from jaxserve.models.families._rope import by_layer_type, without_proportional

DEFAULTS = {key: value for key, value in COMMON_DEFAULTS.items() if key not in ("hidden_act", "rms_norm_eps")} | {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 256,
    "conv_bias": False,
    "conv_L_cache": 7,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
}
_ROPE: Final[Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
_RENAMES: Final = {
    **{name: ours for name, ours in lfm2.RENAMES.items() if name != "ffn_norm"},
    "post_operator_norm": "post_attention_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
    "g_proj": "gate_proj",
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Short convolutions, attention with a window and with half of each head rotated, a gate for each head, and sandwich norms."""
    keys = _keys(hf)
    has_gate = keys.flag("use_attention_gate")
    if has_gate:
        keys.require("attention_bias", False)  # gates have no bias
    layers = _layers(keys)
    keys, sliding_theta = by_layer_type(keys, 10_000.0)
    keys, scaling = without_proportional(keys, keys.integer("head_dim", MAX_HEAD_DIM, low=2))
    config = build(keys, layers=layers)
    return replace(
        config,
        rope_scaling=config.rope_scaling if scaling is None else scaling,
        qk_norm="heads",
        norm_placement="sandwich" if keys.flag("use_sandwich_norm") else "pre",
        output_gate="heads" if has_gate else "none",
        sliding_rope_theta=sliding_theta,
    )


def _keys(hf: dict[str, Any]) -> Keys:
    """Return the keys with the names of other families, and without a rope of a kind of its own.

    transformers reads the epsilon of norms from either key, and the other families' first.
    """
    keys = {**DEFAULTS, "hidden_act": "silu", "max_position_embeddings": 128_000, **hf}
    tables = keys.get("rope_parameters") or _ROPE
    if not isinstance(tables, dict) or not any(isinstance(table, dict) for table in tables.values()):
        raise Keys(keys).error("rope_parameters", "tables full_attention and sliding_attention")
    return Keys({**keys, "rope_parameters": tables, "rms_norm_eps": hf.get("rms_norm_eps", keys["norm_eps"])})


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which by default every fourth has full attention, every fourth a window, and the others a convolution."""
    kinds = {2: "full_attention", 0: "sliding_attention"}
    default = [kinds.get(index % 4, "conv") if index else "conv" for index in range(num_layers(keys))]
    conv = ShortConvConfig(
        num_channels=keys.integer("hidden_size", MAX_WIDTH),
        num_taps=keys.integer("conv_L_cache", MAX_TAPS, low=2),
        has_bias=keys.flag("conv_bias"),
    )
    return hybrid_layers(keys, layer_names(keys, default), "conv", conv, window=read_window(keys))


def _renames(hf: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our name of the norm before the feed-forward block, which depends on the norms after the blocks."""
    return {
        "ffn_norm": "post_attention_layernorm" if hf.get("use_sandwich_norm") is False else "pre_feedforward_layernorm"
    }


FAMILY = Family(
    ("Lfm3ForCausalLM",),
    decoder_config,
    text_part_of=("Lfm3VlForConditionalGeneration",),
    read_vision=lfm3_vl,
    renames=_RENAMES,
    config_renames=_renames,
)
