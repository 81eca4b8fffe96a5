"""FlexOlmo (arXiv 2507.07024)."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.olmo2 import olmo

DEFAULTS = dict(
    COMMON_DEFAULTS,
    rope_theta=500_000.0,
    attention_bias=False,
    num_experts=7,
    num_experts_per_tok=5,
    norm_topk_prob=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """OLMo 2 with experts in every layer."""
    keys = Keys({**DEFAULTS, **hf})
    experts = read_experts(keys, "num_experts", "intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    return olmo(keys, all_with_experts(full_layers(keys), experts), *COUNT_KEYS)


FAMILY = Family(("FlexOlmoForCausalLM",), decoder_config)
