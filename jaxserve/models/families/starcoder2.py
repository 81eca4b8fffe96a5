"""StarCoder2 (arXiv 2402.19173)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, WINDOW, GGUFArchitecture, GGUFKeys
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
_WINDOW: Final = 4096


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm, biases everywhere or nowhere but in norms, and GELU without a gate; `sliding_window` holds in every layer."""
    keys = Keys({**DEFAULTS, **hf})
    has_bias = keys.flag("use_bias")
    config = build(keys, layers=uniform_layers(keys), qkv_bias=has_bias, eps_key="norm_epsilon")
    return replace(
        config, norm_kind="layer_with_bias", attention_out_bias=has_bias, mlp_bias=has_bias, mlp_has_gate=False
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published models' window, which converters leave out, and whether there are biases."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.integer(WINDOW, _WINDOW),
        "use_bias": "blk.0.attn_q.bias" in keys.file.tensors,
    }


FAMILY = Family(
    ("Starcoder2ForCausalLM",),
    decoder_config,
    renames={"c_fc": "up_proj", "c_proj": "down_proj"},
    gguf=GGUFArchitecture("starcoder2", eps_key="norm_epsilon", top_names=LAYER_NORM_NAMES, config=_gguf_config),
)
