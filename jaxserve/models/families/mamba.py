"""Mamba (Gu & Dao, arXiv 2312.00752)."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _mamba
from jaxserve.models.families._mamba import own_keys, read_scan, without_attention

DEFAULTS = _mamba.DEFAULTS


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Read a selective scan in every layer, and nothing else."""
    keys = own_keys(hf, DEFAULTS)
    return without_attention(keys, read_scan(keys))


FAMILY = Family(("MambaForCausalLM",), decoder_config, renames=_mamba.RENAMES)
