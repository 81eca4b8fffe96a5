"""Ministral 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._rope import query_scaling

DEFAULTS = dict(COMMON_DEFAULTS, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, sliding_window=None)
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Mistral with yarn, and queries that grow with the logarithm of their position."""
    keys = Keys({**DEFAULTS, **hf})
    if not keys.get("rope_parameters"):
        keys.require("rope_scaling", None)
        keys = Keys({**keys.table, "rope_parameters": _ROPE})
    keys.require("attention_bias", False, None)
    return replace(build(keys, layers=uniform_layers(keys), qkv_bias=False), query_scaling=query_scaling(keys))


FAMILY = Family(
    ("Ministral3ForCausalLM",),
    decoder_config,
    text_part_of=("Mistral3ForConditionalGeneration",),
    read_vision=pixtral,
    text_model_types=("ministral3",),
)
