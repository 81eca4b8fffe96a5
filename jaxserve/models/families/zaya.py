"""ZAYA1 (arXiv 2511.17127): compressed convolutional attention, and experts whose router is an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import ConvolvedQKVConfig
from jaxserve.models.families._common import MAX_WIDTH, build, num_layers, read_window
from jaxserve.models.families._experts import COUNT_KEYS, read_experts
from jaxserve.models.families._hybrid import MAX_TAPS, layer_names
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_layer_type

DEFAULTS: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "sliding_window": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "lm_head_bias": False,
    "moe_intermediate_size": 2048,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "router_hidden_size": 256,
    "cca_time0": 2,
    "cca_time1": 2,
}
_KINDS: Final = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Our kinds of layers, by the family's."""
_ROPE: Final[Mapping[str, Any]] = {
    "hybrid": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    "hybrid_sliding": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Convolved queries, keys and values, biases and factors in the residual stream, and one expert or none for each token.

    The bias of none is that of the checkpoint; transformers puts -1 in its place, which ZAYA1 begins with.
    """
    keys = Keys({**DEFAULTS, "max_position_embeddings": 131_072, **hf})
    keys.require("hidden_act", "silu")
    keys.require("attention_bias", False)
    keys.require("num_experts_per_tok", 1)
    if keys.flag("lm_head_bias"):
        keys.require("tie_word_embeddings", False)
    windows = _windows(keys)
    own = {"rope_parameters": _tables(keys), "intermediate_size": keys.integer("moe_intermediate_size", MAX_WIDTH)}
    keys, sliding_theta = by_layer_type(Keys({**keys.table, **own}), 10_000.0, fraction=1.0)
    config = build(keys, layers=(LayerConfig(),) * len(windows), computed=(*COUNT_KEYS, "partial_rotary_factor"))
    qkv = ConvolvedQKVConfig(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_depthwise_taps=keys.integer("cca_time0", MAX_TAPS, low=2),
        num_grouped_taps=keys.integer("cca_time1", MAX_TAPS, low=2),
    )
    experts = replace(
        read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=False),
        router_width=keys.integer("router_hidden_size", MAX_WIDTH),
    )
    layers = tuple(
        LayerConfig(window, recurrent=qkv, experts=replace(experts, has_router_state=index > 0))
        for index, window in enumerate(windows)
    )
    return replace(
        config,
        layers=layers,
        has_residual_affine=True,
        lm_head_bias=keys.flag("lm_head_bias"),
        sliding_rope_theta=sliding_theta,
    )


def _windows(keys: Keys) -> list[int | None]:
    """Return the window of each layer."""
    names = layer_names(keys, ["hybrid"] * num_layers(keys))
    window = read_window(keys)
    if any(name not in _KINDS for name in names) or (window is None and "hybrid_sliding" in names):
        raise keys.error("layer_types", "hybrid, and hybrid_sliding with a sliding_window, only")
    return [window if name == "hybrid_sliding" else None for name in names]


def _tables(keys: Keys) -> dict[str, dict[str, Any]]:
    """Return the tables of rope by our kinds of layers; that of a kind that no layer has may be missing."""
    tables = keys.get("rope_parameters") or _ROPE
    if not isinstance(tables, dict) or not isinstance(tables.get("hybrid"), dict):
        raise keys.error("rope_parameters", f"tables {' and '.join(_KINDS)}")
    full = {"partial_rotary_factor": 1.0, **tables["hybrid"]}
    default = {"partial_rotary_factor": full["partial_rotary_factor"]}
    sliding = tables.get("hybrid_sliding", default)
    if not isinstance(sliding, dict):
        raise keys.error("rope_parameters", f"tables {' and '.join(_KINDS)}")
    return {"full_attention": full, "sliding_attention": {"partial_rotary_factor": 1.0, **sliding}}


FAMILY = Family(
    ("ZayaForCausalLM",),
    decoder_config,
    renames={"self_attn.qkv_proj": "self_attn.convolved_qkv", "self_attn.qk_norm": "self_attn.key_factors"},
    stacked_experts="halves",
)
