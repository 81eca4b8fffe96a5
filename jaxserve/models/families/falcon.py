"""Falcon 7B and 40B (arXiv 2311.16867), 180B and Falcon 2 11B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.model_config.decoder import DecoderConfig, NormPlacement
from jaxserve.models.families._gpt import gpt, our_keys
from jaxserve.models.families._keys import Keys

DEFAULTS = {
    "activation": "gelu",
    "ffn_hidden_size": None,
    "layer_norm_epsilon": 1e-5,
    "num_kv_heads": None,
    "num_ln_in_parallel_attn": None,
    "alibi": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
_KEY_NAMES: Final = {
    "n_embed": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
_LENGTH: Final = {"max_position_embeddings": 2048}
"""transformers' default, which published configs leave out."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm and GELU without a gate; blocks beside each other, which may have a norm each; one KV head, some or all.

    Linear biases of attention scores by distance (ALiBi) are rejected.
    """
    keys = our_keys(hf, {**DEFAULTS, **_LENGTH}, _KEY_NAMES)
    keys.require("alibi", False, None)
    keys = replace(keys, table=with_kv_heads(keys.table))
    has_bias = keys.flag("bias")
    config = gpt(keys, has_rope=True, qkv_bias=has_bias)
    return replace(config, attention_out_bias=has_bias, mlp_bias=has_bias, norm_placement=_placement(keys))


def with_kv_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the number of KV heads."""
    is_new = config.get("new_decoder_architecture", False)
    count = config.get("num_kv_heads") if is_new else 1 if config.get("multi_query", True) else None
    return {**config, "num_key_value_heads": count}


def _placement(keys: Keys) -> NormPlacement:
    if keys.flag("new_decoder_architecture"):
        keys.require("num_ln_in_parallel_attn", None, 1, 2)
        return "parallel" if keys.get("num_ln_in_parallel_attn") == 1 else "parallel_apart"
    return "parallel" if keys.flag("parallel_attn") else "pre"


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind of blocks, by their norms and KV heads, and the activation, which no key has."""
    has_two_norms = "blk.0.attn_norm_2.weight" in keys.file.tensors
    kv_heads = config["num_key_value_heads"]
    return {
        **no_window(keys, config),
        "hidden_act": DEFAULTS["activation"],
        "new_decoder_architecture": has_two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "num_kv_heads": kv_heads,
    }


def _gguf_renames(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our names of norms: the first one in a file is that of feed-forward blocks if there are two."""
    if config["num_ln_in_parallel_attn"] == 1:
        return {}
    return {"input_layernorm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}


FAMILY = Family(
    ("FalconForCausalLM",),
    decoder_config,
    renames={
        "transformer": "model",
        "word_embeddings": "embed_tokens",
        "h": "layers",
        "ln_f": "norm",
        "ln_attn": "input_layernorm",
        "ln_mlp": "post_attention_layernorm",
        "self_attention": "self_attn",
        "query_key_value": "qkv_proj",
        "dense": "o_proj",
        "dense_h_to_4h": "up_proj",
        "dense_4h_to_h": "down_proj",
    },
    key_names=_KEY_NAMES,
    shapes=with_kv_heads,
    qkv_rows=QKVRows("kv_heads"),
    unused_tensors=(".self_attention.rotary_emb.inv_freq",),
    gguf=GGUFArchitecture(
        "falcon",
        eps_key="layer_norm_eps",
        tensor_names={"attn_qkv": "self_attn.qkv_proj", "attn_norm_2": "attn_norm_2"},
        renames=_gguf_renames,
        top_names=LAYER_NORM_NAMES,
        config=_gguf_config,
    ),
)
