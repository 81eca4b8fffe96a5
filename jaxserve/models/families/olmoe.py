"""OLMoE (arXiv 2409.02060)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    rms_norm_eps=1e-5,
    attention_bias=False,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=False,
    clip_qkv=None,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Experts in every layer, and norms over all query heads and all key heads together. `clip_qkv` is rejected."""
    keys = Keys({**DEFAULTS, **hf})
    experts = read_experts(keys, "num_experts", "intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    layers = all_with_experts(full_layers(keys), experts)
    config = build(keys, layers=layers, computed=COUNT_KEYS)
    return replace(config, qk_norm="whole")


FAMILY = Family(
    ("OlmoeForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("olmoe", experts="required"),
)
