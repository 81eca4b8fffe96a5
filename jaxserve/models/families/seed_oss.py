"""Seed-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
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


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return no_window(keys, config) | {"attention_out_bias": "blk.0.attn_output.bias" in keys.file.tensors}


FAMILY = Family(
    ("SeedOssForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "seed_oss",
        has_bias_flags=True,
        tensor_names={"post_attention_norm": "post_attention_layernorm"},
        config=_gguf_config,
    ),
)
