"""BitNet b1.58 (arXiv 2402.17764), as BitNet b1.58 2B4T. `quant.ternary` reads its ternary weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=5,
    hidden_act="relu2",
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    attention_bias=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with norms inside of attention and feed-forward blocks, and squared ReLU."""
    keys = Keys({**DEFAULTS, **hf})
    return replace(build(keys, layers=full_layers(keys)), has_inner_norms=True)


FAMILY = Family(("BitNetForCausalLM",), decoder_config)
