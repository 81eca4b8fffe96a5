"""Hunyuan 3 (HY V3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, dense_layers, no_window
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, dense_or_sparse, read_experts, with_shared
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=11_158_840.0,
    attention_bias=False,
    mlp_bias=False,
    moe_intermediate_size=1536,
    num_experts=192,
    num_experts_per_tok=8,
    num_shared_experts=1,
    router_scaling_factor=2.826,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Norms of query and key heads, and sigmoid-routed and shared experts in all layers but the first or those called dense."""
    keys = Keys({**DEFAULTS, **hf})
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=True)
    scale = keys.number("router_scaling_factor")
    experts = replace(experts, score="sigmoid", has_correction_bias=True, weight_scale=scale)
    experts = with_shared(keys, experts, "num_shared_experts")
    layers = dense_or_sparse(keys, full_layers(keys), experts)
    return replace(build(keys, layers=layers, computed=COUNT_KEYS), qk_norm="heads")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of experts; shared ones are as wide as some routed ones together."""
    check_gating(keys, SIGMOID)
    norm, shared = "expert_weights_norm", "expert_shared_feed_forward_length"
    if not keys.flag(norm):
        keys.fail(norm, "true", keys.get(norm))
    width, dense = keys.integer("expert_feed_forward_length"), dense_layers(keys, config)
    if keys.integer(shared) % width:
        keys.fail(shared, f"a multiple of the width {width} of an expert", keys.get(shared))
    return {
        **no_window(keys, config),
        "moe_intermediate_size": width,
        "num_shared_experts": keys.integer(shared) // width,
        "router_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(config["num_hidden_layers"])],
    }


FAMILY = Family(
    ("HYV3ForCausalLM",),
    decoder_config,
    renames={
        "mlp.router.gate": "mlp.gate",
        "expert_bias": "gate.e_score_correction_bias",
        "shared_mlp": "shared_experts",
    },
    mtp="layer",
    gguf=GGUFArchitecture("hy_v3", bare_parts={"exp_probs_b": "bias"}, experts="required", config=_gguf_config),
)
