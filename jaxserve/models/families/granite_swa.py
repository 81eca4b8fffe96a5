"""Granite with sliding windows, the dense models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import SINKS, WINDOW, GGUFArchitecture, GGUFKeys, layer_types, same_theta
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families import granite
from jaxserve.models.families._common import build, num_layers, read_window, sliding_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.granite import FACTORS, gguf_factors, with_factors

DEFAULTS = dict(
    granite.DEFAULTS, num_key_value_heads=4, rms_norm_eps=1e-5, sliding_window=128, tie_word_embeddings=True
)
_THETAS = "layer_rope_theta"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Granite with attention sinks, and windows in three of four layers, which may have a rope base of their own or none."""
    keys = Keys({**DEFAULTS, **hf})
    config = build(keys, layers=read_layers(keys), computed=("mlp_bias", *FACTORS))
    return with_windows(keys, with_factors(keys, config))


def read_layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which by default all but the first of four have a window. A rope base of 0 leaves a layer without rope."""
    count, window = num_layers(keys), read_window(keys)
    layers = sliding_layers(keys, window, tuple(window is not None and index % 4 > 0 for index in range(count)))
    return tuple(
        replace(layer, use_rope=theta is None or theta > 0)
        for layer, theta in zip(layers, read_thetas(keys, count), strict=True)
    )


def with_windows(keys: Keys, config: DecoderConfig) -> DecoderConfig:
    """Add attention sinks, and the rope bases of layers with full attention and of those with a window."""
    thetas: tuple[set[float], set[float]] = set(), set()
    for layer, theta in zip(config.layers, read_thetas(keys, config.num_layers), strict=True):
        if layer.use_rope:
            thetas[layer.sliding_window is not None].add(config.rope_theta if theta is None else theta)
    if any(len(found) > 1 for found in thetas):
        raise keys.error(_THETAS, "one base for all layers with a window, and one for the others, or 0")
    full, sliding = (next(iter(found), config.rope_theta) for found in thetas)
    config = replace(config, sinks="all", rope_theta=full)
    if sliding == full:
        return config
    if config.rope_scaling is not None:
        raise keys.error(_THETAS, "the same base for all layers, as rope is scaled")
    return replace(config, sliding_rope_theta=sliding)


def read_thetas(keys: Keys, count: int) -> list[float | None]:
    """Read the rope base of each layer, 0 for one without rope; None: that of all."""
    found = keys.get(_THETAS)
    if found is None:
        return [None] * count
    if not isinstance(found, list) or len(found) != count:
        raise keys.error(_THETAS, f"a list with one entry for each of the {count} layers")
    return [0.0 if theta == 0 else Keys({_THETAS: theta}, keys.prefix).number(_THETAS, low=1.0) for theta in found]


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors, the windows, and which layers rotate."""
    same_theta(keys, config)
    count, pattern = config["num_hidden_layers"], "attention.rope_pattern"
    rotates = keys.get(pattern)
    if rotates is None:
        rotates = [True] * count
    if not isinstance(rotates, list) or len(rotates) != count or not all(each in (0, 1) for each in rotates):
        keys.fail(pattern, f"true or false for each of the {count} layers", rotates)
    return {
        **gguf_factors(keys, config),
        "sliding_window": keys.integer(WINDOW),
        "layer_types": layer_types(keys, config, 4),
        _THETAS: [config["rope_theta"] if each else 0 for each in rotates],
    }


FAMILY = Family(
    ("GraniteSWAForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "granite_swa",
        is_rope_permuted=True,
        has_bias_flags=True,
        tensor_names={"attn_sinks": SINKS},
        config=_gguf_config,
    ),
)
