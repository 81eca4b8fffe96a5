"""Granite with experts and sliding windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import granitemoeshared
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.granite_swa import read_layers, with_windows
from jaxserve.models.families.granitemoe import granite_moe

DEFAULTS = dict(granitemoeshared.DEFAULTS, sliding_window=128)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Granite with windows, with experts and maybe a shared expert in every layer."""
    keys = Keys({**DEFAULTS, "max_position_embeddings": 2048, **hf})
    return with_windows(keys, granite_moe(keys, read_layers(keys), shared_width="shared_intermediate_size"))


FAMILY = replace(
    granitemoeshared.FAMILY,
    architectures=("GraniteMoeSWAForCausalLM",),
    decoder_config=decoder_config,
    renames={**granitemoeshared.FAMILY.renames, "block_sparse_moe.router": "mlp.gate"},
)
