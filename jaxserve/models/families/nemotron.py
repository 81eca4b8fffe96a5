"""Nemotron (arXiv 2402.16819) and Minitron, the dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm with weights stored minus 1, partial rotation, and feed-forward blocks without a gate."""
    keys = Keys({**DEFAULTS, "partial_rotary_factor": 0.5, **hf})
    computed = ("mlp_bias", "partial_rotary_factor")
    config = build(keys, layers=full_layers(keys), computed=computed, eps_key="norm_eps")
    return replace(config, norm_kind="layer_with_bias", norm_weights="offset", mlp_has_gate=False)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return no_window(keys, config) | {"hidden_act": "relu2"}


FAMILY = Family(
    ("NemotronForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "nemotron",
        has_bias_flags=True,
        has_partial_rotary=True,
        eps_key="norm_eps",
        norm_offset=1.0,
        top_names=LAYER_NORM_NAMES,
        config=_gguf_config,
    ),
)
