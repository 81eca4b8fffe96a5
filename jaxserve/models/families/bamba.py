"""Bamba: Mamba-2 mixers, and attention of which half of each head rotates."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, listed_layers, num_layers
from jaxserve.models.families._hybrid import MAMBA_DEFAULTS, hybrid_layers, mamba_width, read_mamba
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    attention_bias=False,
    mlp_bias=False,
    **MAMBA_DEFAULTS,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with Mamba-2 mixers in all layers but those of `attn_layer_indices`."""
    keys = Keys({**DEFAULTS, "partial_rotary_factor": 0.5, "max_position_embeddings": 262_144, **hf})
    count = num_layers(keys)
    attention = listed_layers(keys, "attn_layer_indices", count)
    names = ["full_attention" if index in attention else "linear_attention" for index in range(count)]
    mamba = read_mamba(keys, mamba_width(keys), norm="gate_first")
    config = build(
        keys,
        layers=hybrid_layers(keys, names, "linear_attention", mamba),
        computed=("mlp_bias", "partial_rotary_factor"),
    )
    keys.require("attn_rotary_emb", config.rotary_dim, None)
    return config


FAMILY = Family(
    ("BambaForCausalLM",),
    decoder_config,
    renames={
        "feed_forward": "mlp",
        "pre_ff_layernorm": "post_attention_layernorm",
        "final_layernorm": "norm",
    },
)
