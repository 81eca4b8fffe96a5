"""GLM-4 (arXiv 2406.12793): the 9B models of 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import without_sections

DEFAULTS = dict(COMMON_DEFAULTS, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7, attention_bias=True)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with QKV biases; the first half of each head rotates, in adjacent pairs."""
    keys = without_sections(Keys({**DEFAULTS, "partial_rotary_factor": 0.5, **hf}))
    config = build(
        keys, layers=full_layers(keys), qkv_bias=keys.flag("attention_bias"), computed=("partial_rotary_factor",)
    )
    return replace(config, rotary_pairs="adjacent")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `attention_bias`. Files of the first published form, ChatGLM, have queries, keys and values as one."""
    biases = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return no_window(keys, config) | {"attention_bias": any(name in keys.file.tensors for name in biases)}


FAMILY = Family(
    ("GlmForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "chatglm",
        has_partial_rotary=True,
        tensor_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config=_gguf_config,
    ),
)
