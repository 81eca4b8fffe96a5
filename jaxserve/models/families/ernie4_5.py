"""ERNIE 4.5, the dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    use_bias=False,
    tie_word_embeddings=True,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with adjacent rotary pairs, and one flag for the biases of all matmuls."""
    keys = Keys({**DEFAULTS, **hf})
    return ernie(keys, full_layers(keys))


def ernie(keys: Keys, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    """Build the features that all models of ERNIE 4.5 share."""
    has_bias = keys.flag("use_bias")
    config = build(keys, layers=layers, qkv_bias=has_bias)
    return replace(config, attention_out_bias=has_bias, mlp_bias=has_bias, rotary_pairs="adjacent")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return no_window(keys, config) | {"use_bias": "blk.0.ffn_down.bias" in keys.file.tensors}


FAMILY = Family(
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    decoder_config,
    gguf=GGUFArchitecture("ernie4_5", config=_gguf_config),
)
