"""OLMo 2 (arXiv 2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import build, full_layers
from jaxserve.models.families._keys import Keys

ARCHITECTURES = ("Olmo2ForCausalLM",)

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Norms behind every block, and over all heads of queries and of keys together."""
    keys = Keys({**DEFAULTS, **hf})
    return olmo(keys, full_layers(keys))


def olmo(keys: Keys, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    """What OLMo 3 has of it, too."""
    keys.require("mlp_bias", False, None)
    has_bias = keys.flag("attention_bias")
    config = build(keys, layers=layers, qkv_bias=has_bias, attention_out_bias=has_bias)
    return replace(config, norm_placement="post", norm_weights="wide", qk_norm="whole")
