"""Solar Open."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_routed_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    attention_bias=False,
    moe_intermediate_size=1280,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with sigmoid-routed and shared experts in every layer."""
    keys = Keys({**DEFAULTS, "intermediate_size": 10_240, **hf})  # which no layer has
    keys.require("first_k_dense_replace", 0, None)
    keys.require("use_qk_norm", False, None)
    experts = read_routed_experts(keys, "n_routed_experts", "n_shared_experts")
    return build(
        keys,
        layers=all_with_experts(full_layers(keys), experts),
        qkv_bias=keys.flag("attention_bias"),
        computed=(*COUNT_KEYS, "n_shared_experts"),
    )


FAMILY = Family(("SolarOpenForCausalLM",), decoder_config)
