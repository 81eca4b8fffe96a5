"""Helium."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=20,
    head_dim=128,
    rms_norm_eps=1e-8,
    rope_theta=100_000.0,
    attention_bias=False,
    mlp_bias=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama whose neighbouring dimensions rotate together."""
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=full_layers(keys), qkv_bias=keys.flag("attention_bias"), computed=("mlp_bias",))
    return replace(config, rotary_pairs="adjacent", norm_weights="wide")


FAMILY = Family(("HeliumForCausalLM",), decoder_config)
