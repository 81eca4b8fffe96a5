"""Qwen3-Omni (arXiv 2509.17765), as Qwen3-Omni-30B-A3B: the part of its checkpoints that makes texts, and its tower for images."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import qwen3_moe
from jaxserve.models.families._common import COMMON_DEFAULTS
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._vision import qwen_vision

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=4,
    attention_bias=False,
    sliding_window=None,
    decoder_sparse_step=1,
    mlp_only_layers=None,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rope_theta=1_000_000.0,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3 with experts in every layer or some, without windows."""
    # transformers ignores `sliding_window` in this model.
    keys = without_sections(Keys({**DEFAULTS, **hf, "use_sliding_window": False}))
    return qwen3_moe.decoder_config({**keys.table})


FAMILY = Family(
    ("Qwen3OmniMoeThinkerTextModel",),
    decoder_config,
    text_part_of=("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    read_vision=qwen_vision,
    stacked_experts="halves",
)
