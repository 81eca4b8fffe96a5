"""Arcee Foundation Models, as AFM-4.5B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(COMMON_DEFAULTS, hidden_act="relu2", rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with feed-forward blocks without a gate, whose activation is the square of ReLU."""
    keys = Keys({**DEFAULTS, **hf})
    return replace(build(keys, layers=full_layers(keys), computed=("mlp_bias",)), mlp_has_gate=False)


FAMILY = Family(
    ("ArceeForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "arcee", is_rope_permuted=True, has_bias_flags=True, config=lambda keys, config: {"hidden_act": "relu2"}
    ),
)
