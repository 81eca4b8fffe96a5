"""Mistral 7B and its successors published as MistralForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, uniform_layers
from jaxserve.models.families._keys import Keys

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama without biases; `sliding_window` applies to every layer and defaults to 4096 (null is none)."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("attention_bias", False, None)
    keys.require("mlp_bias", False, None)
    return build(keys, layers=uniform_layers(keys))


FAMILY = Family(
    ("MistralForCausalLM",),
    decoder_config,
    text_part_of=("Mistral3ForConditionalGeneration",),
)
