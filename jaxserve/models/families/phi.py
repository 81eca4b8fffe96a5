"""Phi-1, Phi-1.5 (arXiv 2309.05463) and Phi-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import LAYER_NORM_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(LAYER_NORM_DEFAULTS, hidden_act="gelu_new", qk_layernorm=False)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Attention and a feed-forward block without a gate beside each other, LayerNorm, partial rotation, biases everywhere."""
    keys = Keys({**DEFAULTS, "partial_rotary_factor": 0.5, **hf})
    keys.require("qk_layernorm", False)
    config = build(
        keys,
        layers=full_layers(keys),
        qkv_bias=True,
        computed=("partial_rotary_factor",),
        eps_key="layer_norm_eps",
    )
    return replace(
        config,
        norm_kind="layer_with_bias",
        norm_placement="parallel",
        attention_out_bias=True,
        mlp_bias=True,
        mlp_has_gate=False,
        lm_head_bias=True,
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return no_window(keys, config) | {"hidden_act": "gelu_new"}


FAMILY = Family(
    ("PhiForCausalLM",),
    decoder_config,
    renames={"dense": "o_proj", "fc1": "up_proj", "fc2": "down_proj", "final_layernorm": "norm"},
    gguf=GGUFArchitecture(
        "phi2",
        has_partial_rotary=True,
        eps_key="layer_norm_eps",
        top_names={**LAYER_NORM_NAMES, "output.bias": "lm_head.bias"},
        config=_gguf_config,
    ),
)
