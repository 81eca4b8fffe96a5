"""Qwen3-VL with experts (arXiv 2511.21631), as Qwen3-VL-30B-A3B: the text part of its checkpoints, and their tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import qwen3_moe
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, read_experts, some_with_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._vision import qwen_vision

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=16,
    attention_bias=False,
    decoder_sparse_step=1,
    mlp_only_layers=None,
    moe_intermediate_size=1408,
    num_experts=60,
    num_experts_per_tok=4,
    rope_theta=500_000.0,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3 with experts, whose weights for a token always sum to 1: transformers does not read `norm_topk_prob` here."""
    # transformers ignores `sliding_window` in this model.
    keys = without_sections(Keys({**DEFAULTS, **hf, "sliding_window": None}))
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=True)
    layers = some_with_experts(keys, full_layers(keys), experts)
    config = build(keys, layers=layers, computed=COUNT_KEYS)
    return replace(config, qk_norm="heads")


FAMILY = Family(
    ("Qwen3VLMoeTextModel",),
    decoder_config,
    text_part_of=("Qwen3VLMoeForConditionalGeneration",),
    read_vision=qwen_vision,
    stacked_experts="halves_of_either_order",
    gguf=GGUFArchitecture("qwen3vlmoe", experts="required", config=qwen3_moe.gguf_config),
)
