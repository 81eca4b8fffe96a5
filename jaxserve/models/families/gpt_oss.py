"""gpt-oss (arXiv 2508.10925)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import SINKS, WINDOW, GGUFArchitecture, GGUFKeys, layer_types
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ClampedGate
from jaxserve.models.families._common import COMMON_DEFAULTS, alternating_layers, build
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    attention_bias=True,
    sliding_window=128,
    num_local_experts=128,
    num_experts_per_tok=4,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
)
_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Attention sinks, a window in every second layer, biases everywhere, and experts with clamped gates."""
    keys = Keys({**DEFAULTS, **({} if hf.get("rope_parameters") else {"rope_scaling": _ROPE}), **hf})
    keys.require("hidden_act", "silu")
    keys.require("mlp_bias", None)
    experts = replace(
        read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=True),
        has_biases=True,
        clamp=ClampedGate(keys.number("swiglu_limit"), keys.number("swiglu_alpha")),
    )
    config = build(keys, layers=all_with_experts(alternating_layers(keys, 2), experts), computed=COUNT_KEYS)
    return replace(config, norm_weights="wide", sinks="all")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from other files. Bounds of yarn's parts are not rounded, as in the published model; no key
    carries that, nor the limit and slope of experts' gates."""
    own = {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer(WINDOW),
        "layer_types": layer_types(keys, config, 2),
    }
    scaling = config.get("rope_scaling")
    return own | {"rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"}}


FAMILY = Family(
    ("GptOssForCausalLM",),
    decoder_config,
    renames={"router": "gate"},
    stacked_experts="interleaved",
    gguf=GGUFArchitecture(
        "gpt-oss",
        experts="required",
        tensor_names={"post_attention_norm": "post_attention_layernorm", "attn_sinks": SINKS},
        config=_gguf_config,
    ),
)
