"""Cohere 2: Command R7B and Command A."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import WINDOW, GGUFArchitecture, GGUFKeys, layer_types, same_theta
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import cohere as command_r
from jaxserve.models.families._cohere_vision import cohere_vision
from jaxserve.models.families._common import LAYER_NORM_DEFAULTS, MAX_LAYERS, alternating_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS = dict(
    LAYER_NORM_DEFAULTS, logit_scale=0.0625, attention_bias=False, sliding_window=4096, tie_word_embeddings=True
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Command R with a sliding window and rope in three of four layers; the fourth has neither."""
    keys = Keys({**DEFAULTS, "sliding_window_pattern": 4, **hf})
    keys.integer("sliding_window", MAX_POSITION)
    layers = alternating_layers(keys, keys.integer("sliding_window_pattern", MAX_LAYERS))
    return command_r.cohere(keys, tuple(replace(layer, use_rope=layer.sliding_window is not None) for layer in layers))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    same_theta(keys, config)
    return {
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.integer(WINDOW),
        "layer_types": layer_types(keys, config, 4),
    }


FAMILY = Family(
    ("Cohere2ForCausalLM",),
    decoder_config,
    text_part_of=("Cohere2VisionForConditionalGeneration", "AyaVisionForConditionalGeneration"),
    read_vision=cohere_vision,
    text_model_types=("cohere2", None),
    gguf=GGUFArchitecture("cohere2", eps_key="layer_norm_eps", config=_gguf_config),
)
