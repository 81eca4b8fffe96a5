"""Qwen3, the dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, qwen_layers
from jaxserve.models.families._keys import Keys

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with RMSNorm of each query and key head; `head_dim` defaults to 128, not D / N."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("mlp_bias", False, None)
    has_attention_bias = keys.flag("attention_bias")
    config = build(keys, layers=qwen_layers(keys), qkv_bias=has_attention_bias, attention_out_bias=has_attention_bias)
    return replace(config, qk_norm="heads")


FAMILY = Family(
    ("Qwen3ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("qwen3", has_bias_flags=True),
)
