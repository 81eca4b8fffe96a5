"""Jais 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import LAYER_NORM_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(LAYER_NORM_DEFAULTS, hidden_act="relu2", attention_bias=True, mlp_bias=True)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with LayerNorm, biases everywhere, and the square of ReLU without a gate."""
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=full_layers(keys), computed=("mlp_bias",), eps_key="layer_norm_eps")
    return replace(config, norm_kind="layer_with_bias", mlp_has_gate=False)


FAMILY = Family(("Jais2ForCausalLM",), decoder_config)
