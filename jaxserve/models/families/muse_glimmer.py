"""Muse Glimmer, for texts and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, num_layers, read_window, sliding_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._muse_vision import muse_vision
from jaxserve.models.families.granite_swa import read_thetas

_CAP: Final = "final_logit_softcapping"
_THETAS: Final = "layer_rope_theta"
DEFAULTS = {key: value for key, value in COMMON_DEFAULTS.items() if key != "hidden_act"} | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "sliding_window": 2048,
    _CAP: 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-8,
}
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "max_position_embeddings": 131_072,
}
"""transformers' defaults of further keys."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gated attention between sandwich norms, with normalised queries, keys and embeddings; of four layers three have a window, and
    one does not rotate."""
    keys = Keys({**DEFAULTS, **_SIZES, **hf})
    keys.require("attention_bias", False)  # gates have none
    config = build(keys, layers=_layers(keys), computed=(_CAP,), activation_key="hidden_activation")
    if any(theta not in (None, 0.0, config.rope_theta) for theta in read_thetas(keys, config.num_layers)):
        raise keys.error(_THETAS, f"{config.rope_theta:g}, the base of all layers, or 0")
    return replace(
        config,
        qk_norm="heads",
        qk_norm_weights="none",
        norm_placement="sandwich",
        norm_weights="offset",
        final_norm_weights="wide",
        post_norm_eps=keys.number("post_norm_eps"),
        embedding_norm="tokens",
        attention_scale=config.head_dim**-0.5 * keys.number("qk_scale_factor"),
        output_gate="apart",
        logit_scale=keys.number("output_multiplier"),
        logit_softcap=keys.number(_CAP),
    )


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which by default the last of every four, counted from the last layer, have no window and do not rotate."""
    count, window = num_layers(keys), read_window(keys)
    is_last = [(count - 1 - index) % 4 == 0 for index in range(count)]
    layers = sliding_layers(keys, window, tuple(window is not None and not last for last in is_last))
    thetas = read_thetas(keys, count)
    is_still = is_last if keys.get(_THETAS) is None else [theta == 0 for theta in thetas]
    return tuple(replace(layer, use_rope=not still) for layer, still in zip(layers, is_still, strict=True))


FAMILY = Family(
    ("MuseGlimmerTextModel",),
    decoder_config,
    text_part_of=("MuseGlimmerForConditionalGeneration",),
    read_vision=muse_vision,
)
