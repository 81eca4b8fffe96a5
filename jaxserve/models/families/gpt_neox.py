"""GPT-NeoX (arXiv 2204.06745), Pythia, Dolly and RedPajama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.model_config.decoder import DecoderConfig, NormPlacement
from jaxserve.models.families._gpt import gpt, our_keys

DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
KEY_NAMES: Final = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm, partial rotation, GELU without a gate, and perhaps blocks beside each other, each with a norm of its own."""
    keys = our_keys(hf, {**DEFAULTS, "partial_rotary_factor": 0.25}, KEY_NAMES)
    has_bias = keys.flag("attention_bias")
    config = gpt(keys, has_rope=True, qkv_bias=has_bias, computed=("partial_rotary_factor",))
    placement: NormPlacement = "parallel_apart" if keys.flag("use_parallel_residual") else "pre"
    return replace(config, attention_out_bias=has_bias, norm_placement=placement)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the order of blocks, biases, and the activation, which no key has."""
    return {
        **no_window(keys, config),
        "hidden_act": DEFAULTS["hidden_act"],
        "use_parallel_residual": keys.flag("use_parallel_residual"),
        "attention_bias": "blk.0.attn_qkv.bias" in keys.file.tensors,
    }


FAMILY = Family(
    ("GPTNeoXForCausalLM",),
    decoder_config,
    renames={
        "gpt_neox": "model",
        "embed_in": "embed_tokens",
        "embed_out": "lm_head",
        "final_layer_norm": "norm",
        "attention": "self_attn",
        "query_key_value": "qkv_proj",
        "dense": "o_proj",
        "dense_h_to_4h": "up_proj",
        "dense_4h_to_h": "down_proj",
    },
    key_names=KEY_NAMES,
    qkv_rows=QKVRows("kv_heads"),
    unused_tensors=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
    gguf=GGUFArchitecture(
        "gptneox",
        has_partial_rotary=True,
        eps_key="layer_norm_eps",
        tensor_names={"attn_qkv": "self_attn.qkv_proj"},
        top_names=LAYER_NORM_NAMES,
        config=_gguf_config,
    ),
)
