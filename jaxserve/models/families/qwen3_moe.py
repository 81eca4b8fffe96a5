"""Qwen3 with experts (arXiv 2505.09388), as Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, uniform_layers
from jaxserve.models.families._experts import COUNT_KEYS, read_experts, some_with_experts
from jaxserve.models.families._keys import Keys

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3 with experts in every `decoder_sparse_step`-th layer except those of `mlp_only_layers`.

    With `use_sliding_window` every layer has a window.
    """
    given = Keys({**DEFAULTS, **hf})
    keys = given if given.flag("use_sliding_window") else Keys({**given.table, "sliding_window": None})
    keys.require("mlp_bias", False, None)
    has_bias = keys.flag("attention_bias")
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    layers = some_with_experts(keys, uniform_layers(keys), experts)
    config = build(keys, layers=layers, qkv_bias=has_bias, attention_out_bias=has_bias, computed=COUNT_KEYS)
    return replace(config, qk_norm="heads")


FAMILY = Family(
    ("Qwen3MoeForCausalLM",),
    decoder_config,
)
