"""StarCoder and SantaCoder (GPT-BigCode, arXiv 2305.06161)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import KV_HEADS, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _gpt
from jaxserve.models.families._gpt import gpt, our_keys
from jaxserve.models.families.gpt2 import GGUF_QKV, GGUF_TOP_NAMES, MASKS, RENAMES

DEFAULTS = dict(
    _gpt.DEFAULTS,
    activation_function="gelu_pytorch_tanh",
    scale_attn_weights=True,
    multi_query=True,
    add_cross_attention=False,
    tie_word_embeddings=True,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """GPT-2 with one KV head, or with one for each query head."""
    keys = our_keys(hf, DEFAULTS)
    keys.require("scale_attn_weights", True)
    keys = replace(keys, table=with_kv_heads(keys.table))
    return replace(gpt(keys, has_rope=False), first_position_row=0)


def with_kv_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the number of KV heads that `multi_query` stands for."""
    return {**config, "num_key_value_heads": 1 if config.get("multi_query", True) else None}


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `multi_query`, and the activation, which no key has."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads not in (1, heads):
        keys.fail(KV_HEADS, f"1 or the {heads} of queries", kv_heads)
    return no_window(keys, config) | {"multi_query": kv_heads == 1, "hidden_act": DEFAULTS["activation_function"]}


FAMILY = Family(
    ("GPTBigCodeForCausalLM",),
    decoder_config,
    renames=RENAMES,
    key_names=_gpt.KEY_NAMES,
    shapes=with_kv_heads,
    qkv_rows=QKVRows("kv_heads"),
    unused_tensors=MASKS,
    gguf=GGUFArchitecture(
        "starcoder", eps_key="layer_norm_eps", tensor_names=GGUF_QKV, top_names=GGUF_TOP_NAMES, config=_gguf_config
    ),
)
