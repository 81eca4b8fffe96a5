"""OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import num_layers, read_window, sliding_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_layer_type
from jaxserve.models.families.olmo2 import olmo

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "attention_bias": False,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """OLMo 2 with full attention in every fourth layer and windows in the others; only the former scale rope."""
    # As in transformers: a base outside of the tables belongs to full-attention layers.
    keys, sliding_theta = by_layer_type(Keys({**DEFAULTS, **hf}), DEFAULTS["rope_theta"])
    window = read_window(keys)
    default = tuple(window is not None and (index + 1) % 4 != 0 for index in range(num_layers(keys)))
    layers = sliding_layers(keys, window, default)
    return replace(olmo(keys, layers), sliding_rope_theta=sliding_theta)


FAMILY = Family(
    ("Olmo3ForCausalLM",),
    decoder_config,
)
