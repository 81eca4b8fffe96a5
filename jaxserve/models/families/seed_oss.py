"""Seed-OSS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    attention_bias=True,
    attention_out_bias=False,
    mlp_bias=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with separate flags for the biases of QKV and of the output projection."""
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=full_layers(keys), qkv_bias=keys.flag("attention_bias"), computed=("mlp_bias",))
    return replace(config, attention_out_bias=keys.flag("attention_out_bias"))


FAMILY = Family(("SeedOssForCausalLM",), decoder_config)
