"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv 2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, dense_layers, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, read_qwen_experts, some_with_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=16,
    qkv_bias=True,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
    decoder_sparse_step=1,
    mlp_only_layers=None,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts=60,
    num_experts_per_tok=4,
    norm_topk_prob=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen2 with experts and a gated shared expert; sliding windows, which no published model has, are rejected."""
    keys = Keys({**DEFAULTS, **hf, "sliding_window": None})
    keys.require("use_sliding_window", False)
    experts = read_qwen_experts(keys, is_normalized=keys.flag("norm_topk_prob"))
    return build(
        keys,
        layers=some_with_experts(keys, full_layers(keys), experts),
        qkv_bias=keys.flag("qkv_bias"),
        computed=(*COUNT_KEYS, "shared_expert_intermediate_size"),
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths of experts and of the shared expert."""
    return no_window(keys, config) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "mlp_only_layers": dense_layers(keys, config),
    }


FAMILY = Family(
    ("Qwen2MoeForCausalLM",),
    decoder_config,
    renames={"shared_expert": "shared_experts"},
    gguf=GGUFArchitecture("qwen2moe", experts="required", config=_gguf_config),
)
