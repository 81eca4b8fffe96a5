"""EXAONE 4.0 (arXiv 2507.11407), and EXAONE 4.5 with its tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    POST_NORMS,
    WINDOW,
    GGUFArchitecture,
    GGUFKeys,
    layer_types,
    same_theta,
)
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import (
    COMMON_DEFAULTS,
    MAX_LAYERS,
    alternating_layers,
    build,
    num_layers,
    read_window,
)
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._qwen2_vision import qwen2_vision

DEFAULTS = dict(COMMON_DEFAULTS, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Post-norms and norms of query and key heads; with sliding windows, layers with full attention do not rotate."""
    keys = Keys({**DEFAULTS, "sliding_window_pattern": 4, **hf})
    config = build(keys, layers=read_layers(keys))
    return replace(config, norm_placement="post", qk_norm="heads")


def read_layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Read the layers: `sliding_window_pattern` counts if `layer_types` is absent."""
    if read_window(keys) is None:
        return alternating_layers(keys, 1)
    is_listed = keys.get("layer_types") is not None
    period = num_layers(keys) if is_listed else keys.integer("sliding_window_pattern", MAX_LAYERS)
    layers = alternating_layers(keys, period)
    return tuple(replace(layer, use_rope=layer.sliding_window is not None) for layer in layers)


def gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of sliding windows."""
    if not keys.get(WINDOW):
        return {"sliding_window": None}
    same_theta(keys, config)
    return {"sliding_window": keys.integer(WINDOW), "layer_types": layer_types(keys, config, 4)}


FAMILY = Family(
    ("Exaone4ForCausalLM",),
    decoder_config,
    text_part_of=("Exaone4_5_ForConditionalGeneration",),
    read_vision=qwen2_vision,
    gguf=GGUFArchitecture("exaone4", tensor_names=POST_NORMS, config=gguf_config),
)
