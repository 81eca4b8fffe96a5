"""VaultGemma (arXiv 2510.15001)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import gemma2

DEFAULTS = gemma2.DEFAULTS


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma 2 without the norms after blocks."""
    return replace(gemma2.decoder_config(hf), norm_placement="pre")


FAMILY = Family(
    ("VaultGemmaForCausalLM",),
    decoder_config,
    renames={"pre_feedforward_layernorm": "post_attention_layernorm"},
)
