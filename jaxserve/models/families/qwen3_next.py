"""Qwen3-Next: gated delta nets and gated attention, with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, dense_layers, no_window
from jaxserve.checkpoint.gguf.delta_net import FUSED_NAMES, delta_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._experts import read_qwen_experts, some_with_experts
from jaxserve.models.families._hybrid import QWEN_DEFAULTS, QWEN_SIZES, qwen_hybrid, qwen_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    QWEN_DEFAULTS,
    num_key_value_heads=2,
    decoder_sparse_step=1,
    mlp_only_layers=None,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=512,
    num_experts_per_tok=10,
    norm_topk_prob=True,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3-MoE with gated delta nets in three of four layers, output gates in the others, and a gated shared expert."""
    keys = Keys({**DEFAULTS, **QWEN_SIZES, "intermediate_size": 5632, **hf})
    experts = read_qwen_experts(keys, is_normalized=keys.flag("norm_topk_prob"))
    return qwen_hybrid(keys, some_with_experts(keys, qwen_layers(keys, "by_head"), experts))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return delta nets, widths of experts, and that weights sum to 1, which llama.cpp hard-codes and no key carries."""
    return {
        **no_window(keys, config),
        **delta_config(keys, config),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "mlp_only_layers": dense_layers(keys, config),
        "norm_topk_prob": True,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }


FAMILY = Family(
    ("Qwen3NextForCausalLM",),
    decoder_config,
    renames={"shared_expert": "shared_experts"},
    mtp="module",
    gguf=GGUFArchitecture(
        "qwen3next",
        has_partial_rotary=True,
        norm_offset=1.0,
        tensor_names=FUSED_NAMES,
        experts="required",
        config=_gguf_config,
    ),
)
