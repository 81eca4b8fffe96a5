"""Mamba-2 (Dao & Gu, arXiv 2405.21060), also Codestral Mamba."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.mamba import TENSOR_NAMES, mamba_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _mamba
from jaxserve.models.families._hybrid import read_mamba
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._mamba import gguf_scan_config, own_keys, width, without_attention

DEFAULTS = dict(
    _mamba.DEFAULTS,
    state_size=128,
    n_groups=8,
    tie_word_embeddings=False,
)
_NAMES: Final = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
"""The family's keys, by those of other families with Mamba-2."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Read a Mamba-2 mixer in every layer, and nothing else.

    Its gate comes before its norm, whatever `norm_before_gate` says, as in transformers. Steps are bounded by `time_step_limit` in
    prompts and in generation; transformers bounds those of prompts.
    """
    keys = own_keys(hf, DEFAULTS)
    keys.require("rms_norm", True, None)
    found = {**keys.table, "num_heads": 128, "head_dim": 64, **hf}
    sizes = {ours: found[own] for ours, own in _NAMES.items()}
    mixer = read_mamba(Keys({**keys.table, **sizes}, names=_NAMES), width(keys), norm="gate_first")
    return without_attention(keys, mixer)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of mixers, in which the rank of steps is the number of heads."""
    sizes = mamba_config(keys)
    return gguf_scan_config(keys, config) | {own: sizes[other] for other, own in _NAMES.items()}


FAMILY = Family(
    ("Mamba2ForCausalLM",),
    decoder_config,
    renames=_mamba.RENAMES,
    gguf=GGUFArchitecture("mamba2", has_attention=False, tensor_names=TENSOR_NAMES, config=_gguf_config),
)
