"""Persimmon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._gpt import gpt
from jaxserve.models.families._keys import Keys

DEFAULTS = {
    "hidden_act": "relu2",
    "layer_norm_eps": 1e-5,
    "qk_layernorm": True,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm, also of query and key heads, partial rotation, and feed-forward blocks without a gate."""
    keys = Keys({"num_key_value_heads": None, **DEFAULTS, "partial_rotary_factor": 0.5, **hf})
    keys.require("num_key_value_heads", None, keys.get("num_attention_heads"))
    config = gpt(keys, has_rope=True, computed=("partial_rotary_factor",))
    if not keys.flag("qk_layernorm"):
        return config
    return replace(config, qk_norm="heads", qk_norm_kind="layer_with_bias")


FAMILY = Family(
    ("PersimmonForCausalLM",),
    decoder_config,
    renames={
        "final_layernorm": "norm",
        "query_key_value": "qkv_proj",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
        "dense": "o_proj",
        "dense_h_to_4h": "up_proj",
        "dense_4h_to_h": "down_proj",
    },
    qkv_rows=QKVRows("kv_heads"),
)
