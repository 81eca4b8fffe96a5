"""Llama 2, 3 and 3.x, SmolLM2 and everything else published as LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.checkpoint.gguf.keys import WINDOW, GGUFKeys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """A plain pre-norm decoder; `attention_bias` is on all four projections."""
    keys = Keys({**DEFAULTS, **hf})
    has_attention_bias = keys.flag("attention_bias")
    return build(
        keys,
        layers=full_layers(keys),
        qkv_bias=has_attention_bias,
        attention_out_bias=has_attention_bias,
        mlp_bias=keys.flag("mlp_bias"),
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a llama file with a window as Mistral; the window counts the query itself in both vocabularies."""
    if not keys.get(WINDOW):
        return {}
    return {"architectures": ["MistralForCausalLM"], "sliding_window": keys.integer(WINDOW)}


FAMILY = Family(
    ("LlamaForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("llama", is_rope_permuted=True, has_bias_flags=True, config=_gguf_config),
)
