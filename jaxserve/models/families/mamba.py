"""Mamba (Gu & Dao, arXiv 2312.00752)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.mamba import SCAN_NAMES
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _mamba
from jaxserve.models.families._mamba import gguf_scan_config, own_keys, read_scan, without_attention

DEFAULTS = _mamba.DEFAULTS


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Read a selective scan in every layer, and nothing else."""
    keys = own_keys(hf, DEFAULTS)
    return without_attention(keys, read_scan(keys))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of mixers; a file that says that they have norms is read as Falcon Mamba."""
    found = gguf_scan_config(keys, config)
    return found | {"architectures": ["FalconMambaForCausalLM"]} if keys.flag("ssm.dt_b_c_rms") else found


FAMILY = Family(
    ("MambaForCausalLM",),
    decoder_config,
    renames=_mamba.RENAMES,
    gguf=GGUFArchitecture("mamba", has_attention=False, tensor_names=SCAN_NAMES, config=_gguf_config),
)
