"""MiniMax-M2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.routing import SIGMOID, fixed_router
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_HEAD_DIM, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, PART_NAMES, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=5_000_000.0,
    num_local_experts=256,
    num_experts_per_tok=8,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Norms over all query heads and all key heads, partial rotation, and sigmoid-routed experts in every layer."""
    keys = with_fraction(Keys({**DEFAULTS, **hf}))
    keys.require("use_qk_norm", True, None)
    keys.require("qk_norm_type", "per_layer", None)
    keys.require("scoring_func", "sigmoid", None)
    keys.require("use_routing_bias", True, None)
    keys.require("shared_intermediate_size", 0, None)
    experts = replace(
        read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=True),
        score="sigmoid",
        has_correction_bias=True,
    )
    layers = all_with_experts(full_layers(keys), experts)
    config = build(keys, layers=layers, qkv_bias=False, computed=(*COUNT_KEYS, "partial_rotary_factor"))
    return replace(config, qk_norm="whole")


def with_fraction(keys: Keys) -> Keys:
    """Read `rotary_dim` as the fraction of a head that transformers makes of it."""
    if keys.get("rotary_dim") is None or keys.get("partial_rotary_factor") is not None:
        return keys
    head_dim = keys.integer("head_dim", MAX_HEAD_DIM, low=2)
    fraction = keys.integer("rotary_dim", head_dim, low=2) / head_dim
    return Keys({**keys.table, "partial_rotary_factor": fraction}, keys.prefix)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    fixed_router(keys, SIGMOID)
    return no_window(keys, config)


FAMILY = Family(
    ("MiniMaxM2ForCausalLM",),
    decoder_config,
    renames={
        "block_sparse_moe": "mlp",
        "e_score_correction_bias": "gate.e_score_correction_bias",
        **PART_NAMES,
    },
    gguf=GGUFArchitecture(
        "minimax-m2",
        has_partial_rotary=True,
        experts="required",
        width_key="expert_feed_forward_length",
        config=_gguf_config,
    ),
)
