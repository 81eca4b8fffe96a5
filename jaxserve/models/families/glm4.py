"""GLM-4-0414: the 9B and 32B models of 2025."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import glm

DEFAULTS = glm.DEFAULTS


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """GLM-4 with sandwich norms."""
    return replace(glm.decoder_config(hf), norm_placement="sandwich")


FAMILY = Family(
    ("Glm4ForCausalLM",),
    decoder_config,
    renames={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
)
