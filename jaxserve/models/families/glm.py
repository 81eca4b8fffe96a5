"""GLM-4 (arXiv 2406.12793): the 9B models of 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-7,
    "rope_theta": 10_000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
_PARTIAL: Mapping[str, Any] = {"partial_rotary_factor": 0.5}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with QKV biases; the first half of each head rotates, in adjacent pairs."""
    keys = Keys({**DEFAULTS, **_PARTIAL, **hf})
    keys.require("mlp_bias", False, None)
    config = build(
        keys,
        layers=full_layers(keys),
        qkv_bias=keys.flag("attention_bias"),
        computed=("partial_rotary_factor",),
    )
    return replace(config, rotary_pairs="adjacent")


FAMILY = Family(
    ("GlmForCausalLM",),
    decoder_config,
)
