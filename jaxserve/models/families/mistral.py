"""Mistral 7B and its successors published as MistralForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config import DecoderConfig, LayerConfig
from jaxserve.models.families._common import build, layer_types, num_layers, read_window
from jaxserve.models.families._keys import Keys

ARCHITECTURES = ("MistralForCausalLM",)

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
    """Llama without biases; a `sliding_window` holds for every layer, and absent it is 4096 (null is none)."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("attention_bias", False, None)
    keys.require("mlp_bias", False, None)
    window = read_window(keys)
    # transformers' Mistral ignores `layer_types`, so only a list that changes nothing is accepted.
    slides = layer_types(keys, window, (window is not None,) * num_layers(keys))
    if window is not None and not all(slides):
        raise keys.refusal("layer_types", f"sliding_attention in every layer, as sliding_window is {window}")
    return build(keys, layers=(LayerConfig(window),) * len(slides))
