"""StarCoder2 (arXiv 2402.19173)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import LAYER_NORM_DEFAULTS, build, uniform_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    {key: value for key, value in LAYER_NORM_DEFAULTS.items() if key != "layer_norm_eps"},
    num_key_value_heads=2,
    hidden_act="gelu_pytorch_tanh",
    norm_epsilon=1e-5,
    sliding_window=None,
    use_bias=True,
    tie_word_embeddings=True,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm, biases everywhere or nowhere but in norms, and GELU without a gate; `sliding_window` holds in every layer."""
    keys = Keys({**DEFAULTS, **hf})
    has_bias = keys.flag("use_bias")
    config = build(keys, layers=uniform_layers(keys), qkv_bias=has_bias, eps_key="norm_epsilon")
    return replace(
        config, norm_kind="layer_with_bias", attention_out_bias=has_bias, mlp_bias=has_bias, mlp_has_gate=False
    )


FAMILY = Family(("Starcoder2ForCausalLM",), decoder_config, renames={"c_fc": "up_proj", "c_proj": "down_proj"})
