"""Qwen2 and Qwen2.5, Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, qwen_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._qwen2_vision import qwen2_vision
from jaxserve.models.families._rope import without_sections

DEFAULTS = dict(
    COMMON_DEFAULTS, num_key_value_heads=32, use_sliding_window=False, sliding_window=4096, max_window_layers=28
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with biases of q, k and v (always) and none of the output projection."""
    keys = without_sections(Keys({**DEFAULTS, **hf}))
    keys.require("attention_bias", True, None)
    return build(keys, layers=qwen_layers(keys), qkv_bias=True)


FAMILY = Family(
    ("Qwen2ForCausalLM",),
    decoder_config,
    text_part_of=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    read_vision=qwen2_vision,
    gguf=GGUFArchitecture("qwen2"),
    maxtext=MaxTextLayout(),
)
