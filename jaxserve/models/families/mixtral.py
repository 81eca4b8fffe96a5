"""Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers
from jaxserve.models.families._experts import COUNT_KEYS, PART_NAMES, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=None,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    sliding_window=None,
    num_local_experts=8,
    num_experts_per_tok=2,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Mistral with experts in every layer. Router noise is used in training only."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("attention_bias", False, None)
    experts = read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=True)
    return build(keys, layers=all_with_experts(uniform_layers(keys), experts), qkv_bias=False, computed=COUNT_KEYS)


FAMILY = Family(
    ("MixtralForCausalLM",),
    decoder_config,
    renames={"block_sparse_moe": "mlp", **PART_NAMES},
)
