"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _gpt
from jaxserve.models.families._gpt import gpt, our_keys

DEFAULTS = dict(
    _gpt.DEFAULTS,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
    tie_word_embeddings=True,
)
RENAMES: Final = {
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_proj": "mlp.down_proj",
    "transformer": "model",
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "h": "layers",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "ln_f": "norm",
    "attn": "self_attn",
    "c_attn": "qkv_proj",
    "c_fc": "up_proj",
}
MASKS: Final = (".attn.bias", ".attn.masked_bias")
"""Ends of the names of causal masks in old checkpoints."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Learned embeddings of positions, LayerNorm, biases everywhere, and GELU without a gate."""
    keys = our_keys(hf, DEFAULTS)
    keys.require("scale_attn_weights", True)
    keys.require("scale_attn_by_inverse_layer_idx", False)
    keys.require("add_cross_attention", False)
    return replace(gpt(keys, has_rope=False), first_position_row=0)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation, which no key has."""
    return no_window(keys, config) | {"hidden_act": DEFAULTS["activation_function"]}


GGUF_TOP_NAMES: Final = {**LAYER_NORM_NAMES, "position_embd.weight": "model.embed_positions.weight"}
GGUF_QKV: Final = {"attn_qkv": "self_attn.qkv_proj"}
FAMILY = Family(
    ("GPT2LMHeadModel",),
    decoder_config,
    renames=RENAMES,
    key_names=_gpt.KEY_NAMES,
    transposed=("qkv_proj", "o_proj", "up_proj", "down_proj"),
    unused_tensors=MASKS,
    gguf=GGUFArchitecture(
        "gpt2", eps_key="layer_norm_eps", tensor_names=GGUF_QKV, top_names=GGUF_TOP_NAMES, config=_gguf_config
    ),
)
