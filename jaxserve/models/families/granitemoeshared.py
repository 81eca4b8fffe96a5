"""Granite with experts, of which every token uses one."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import granitemoe
from jaxserve.models.families._common import full_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.granitemoehybrid import RENAMES

DEFAULTS = dict(granitemoe.DEFAULTS, shared_intermediate_size=0)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Granite with experts and a shared expert in every layer."""
    keys = Keys({**DEFAULTS, "max_position_embeddings": 2048, **hf})
    return granitemoe.granite_moe(keys, full_layers(keys), shared_width="shared_intermediate_size")


FAMILY = Family(
    ("GraniteMoeSharedForCausalLM",),
    decoder_config,
    renames={**RENAMES, "shared_mlp": "mlp.shared_experts"},
    stacked_experts="halves",
)
