"""HyperCLOVA X SEED (text)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.granite import FACTORS

DEFAULTS = dict(
    COMMON_DEFAULTS,
    attention_bias=False,
    mlp_bias=False,
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
    attention_multiplier=None,
    logits_scaling=1.0,
    use_post_norm=True,
)
_SANDWICH: Mapping[str, str] = {
    "post_norm1": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with norms before and after blocks, and factors on embeddings, block outputs, scores and logits."""
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=full_layers(keys), computed=("mlp_bias", *FACTORS))
    scale = "attention_multiplier"
    return replace(
        config,
        norm_placement="sandwich" if keys.flag("use_post_norm") else "pre",
        embedding_scale=keys.number("embedding_multiplier"),
        residual_scale=keys.number("residual_multiplier"),
        attention_scale=None if keys.get(scale) is None else keys.number(scale),
        logit_scale=keys.number("logits_scaling"),
    )


def _norm_names(hf: Mapping[str, Any]) -> Mapping[str, str]:
    return _SANDWICH if hf.get("use_post_norm", True) else {}


FAMILY = Family(("HyperCLOVAXForCausalLM",), decoder_config, config_renames=_norm_names)
