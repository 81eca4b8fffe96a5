"""Qwen2.5-Omni (arXiv 2503.20215): the part of its checkpoints that makes texts, and its tower for images."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import qwen2
from jaxserve.models.families._common import COMMON_DEFAULTS
from jaxserve.models.families._qwen2_vision import qwen2_vision

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=4,
    use_sliding_window=False,
    sliding_window=32_768,
    max_window_layers=28,
    rope_theta=1_000_000.0,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen2 with defaults of its own."""
    return qwen2.decoder_config({**DEFAULTS, **hf})


FAMILY = Family(
    ("Qwen2_5OmniThinkerTextModel",),
    decoder_config,
    text_part_of=(
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniModel",
        "Qwen2_5OmniThinkerForConditionalGeneration",
    ),
    read_vision=qwen2_vision,
)
