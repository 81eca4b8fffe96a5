"""Gemma 2 (arXiv 2408.00118)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._gemma import gemma
from jaxserve.models.families._keys import Keys

ARCHITECTURES = ("Gemma2ForCausalLM",)

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Every second layer sees everything; scores and logits are capped."""
    return gemma(Keys({**DEFAULTS, **hf}), pattern=2)
