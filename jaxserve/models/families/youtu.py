"""Youtu-LLM."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import full_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder

DEFAULTS = dict(_latent.DEFAULTS, num_key_value_heads=16, tie_word_embeddings=True)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek-V3's latent attention in a dense model."""
    keys = Keys({**DEFAULTS, "rope_interleave": True, **hf})
    return latent_decoder(keys, full_layers(keys))


FAMILY = Family(("YoutuForCausalLM",), decoder_config)
