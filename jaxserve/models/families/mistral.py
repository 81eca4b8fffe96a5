"""Mistral 7B and its successors published as MistralForCausalLM, which Mistral 3 and Pixtral have as their text part."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._pixtral import pixtral

DEFAULTS = dict(COMMON_DEFAULTS, num_key_value_heads=8, head_dim=None, sliding_window=4096)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama without biases; `sliding_window` applies to every layer and defaults to 4096 (null is none)."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("attention_bias", False, None)
    return build(keys, layers=uniform_layers(keys), qkv_bias=False)


FAMILY = Family(
    ("MistralForCausalLM",),
    decoder_config,
    text_part_of=("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"),
    read_vision=pixtral,
    text_model_type="mistral",
    maxtext=MaxTextLayout(query_scale="head_dim", has_tied_logits=False),
)
