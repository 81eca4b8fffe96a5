"""Hunyuan 3 (HY V3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
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


FAMILY = Family(
    ("HYV3ForCausalLM",),
    decoder_config,
    renames={
        "mlp.router.gate": "mlp.gate",
        "expert_bias": "gate.e_score_correction_bias",
        "shared_mlp": "shared_experts",
    },
)
