"""Falcon Mamba (arXiv 2410.05355): Mamba with norms in its mixers."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _mamba
from jaxserve.models.families._mamba import own_keys, read_scan, without_attention

DEFAULTS = dict(_mamba.DEFAULTS, mixer_rms_eps=1e-6)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Mamba, with norms without weights of B, C and what steps are projected from."""
    keys = own_keys(hf, DEFAULTS)
    mixer = read_scan(keys, norm="weightless", norm_eps=keys.number("mixer_rms_eps"))
    return without_attention(keys, mixer)


FAMILY = Family(("FalconMambaForCausalLM",), decoder_config, renames=_mamba.RENAMES)
