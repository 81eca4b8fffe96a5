"""SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import (
    COMMON_DEFAULTS,
    MAX_LAYERS,
    build,
    layer_types,
    num_layers,
    optional_window,
)
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=4,
    rope_theta=2_000_000.0,
    attention_bias=False,
    mlp_bias=False,
    no_rope_layer_interval=4,
    use_sliding_window=False,
    sliding_window=None,
    tie_word_embeddings=True,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama without rope in every fourth layer; `use_sliding_window` gives those layers a window."""
    keys = Keys({**DEFAULTS, **hf})
    rope = rope_layers(keys)
    window = optional_window(keys)
    is_sliding = layer_types(keys, window, tuple(window is not None and not use_rope for use_rope in rope))
    return build(
        keys,
        layers=tuple(
            LayerConfig(sliding_window=window if is_windowed else None, use_rope=use_rope)
            for is_windowed, use_rope in zip(is_sliding, rope, strict=True)
        ),
        computed=("mlp_bias",),
    )


def rope_layers(keys: Keys) -> tuple[bool, ...]:
    """Read `no_rope_layers`, which despite its name holds 1 for a layer with rope and 0 for one without."""
    count = num_layers(keys)
    marks = keys.get("no_rope_layers")
    if marks is None:
        interval = keys.integer("no_rope_layer_interval", MAX_LAYERS)
        return tuple((index + 1) % interval != 0 for index in range(count))
    if not isinstance(marks, list) or len(marks) < count or any(mark not in (0, 1) for mark in marks):
        raise keys.error("no_rope_layers", f"a list of 0 and 1 with an entry for each of the {count} layers")
    return tuple(bool(mark) for mark in marks[:count])


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Set the interval of layers without rope, which llama.cpp hard-codes and no key carries."""
    interval = DEFAULTS["no_rope_layer_interval"]
    rotates = [int((layer + 1) % interval != 0) for layer in range(config["num_hidden_layers"])]
    return no_window(keys, config) | {"no_rope_layers": rotates}


FAMILY = Family(
    ("SmolLM3ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("smollm3", is_rope_permuted=True, has_bias_flags=True, config=_gguf_config),
)
