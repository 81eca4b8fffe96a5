"""OLMo 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, alternating_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_layer_type
from jaxserve.models.families.olmo2 import olmo

DEFAULTS = dict(COMMON_DEFAULTS, rms_norm_eps=1e-5, rope_theta=500_000.0, attention_bias=False, sliding_window=4096)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """OLMo 2 with full attention in every fourth layer and windows in the others; only the former scale rope."""
    # As in transformers: a base outside of the tables belongs to full-attention layers.
    keys, sliding_theta = by_layer_type(Keys({**DEFAULTS, **hf}), DEFAULTS["rope_theta"])
    return replace(olmo(keys, alternating_layers(keys, 4)), sliding_rope_theta=sliding_theta)


FAMILY = Family(("Olmo3ForCausalLM",), decoder_config)
