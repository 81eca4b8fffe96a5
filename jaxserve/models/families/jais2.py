"""Jais 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import LAYER_NORM_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(LAYER_NORM_DEFAULTS, hidden_act="relu2", attention_bias=True, mlp_bias=True)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with LayerNorm, biases everywhere, and the square of ReLU without a gate."""
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=full_layers(keys), computed=("mlp_bias",), eps_key="layer_norm_eps")
    return replace(config, norm_kind="layer_with_bias", mlp_has_gate=False)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation, which no key has."""
    return no_window(keys, config) | {"hidden_act": "relu2"}


FAMILY = Family(
    ("Jais2ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "jais2", has_bias_flags=True, eps_key="layer_norm_eps", top_names=LAYER_NORM_NAMES, config=_gguf_config
    ),
)
