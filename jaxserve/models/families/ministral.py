"""Ministral 8B of 2024."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import mistral
from jaxserve.models.families._common import build, num_layers, read_window, sliding_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = mistral.DEFAULTS


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Mistral with a sliding window in the layers that `layer_types` names, or else in all."""
    keys = Keys({**DEFAULTS, **hf})
    window = read_window(keys)
    layers = sliding_layers(keys, window, (window is not None,) * num_layers(keys))
    return build(keys, layers=layers, qkv_bias=False)


FAMILY = Family(("MinistralForCausalLM",), decoder_config)
