"""CWM, Meta's code world model (arXiv 2510.02387)."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, num_layers, read_window, sliding_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    mlp_bias=False,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    sliding_window=8192,
)
_ROPE: Final[dict[str, Any]] = {
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
"""The rope of a config that has no table of its own."""
_TABLES: Final = ("rope_parameters", "rope_scaling")


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with a window in all layers but the first of every four, or in those that `layer_types` names."""
    keys = Keys({**DEFAULTS, **hf})
    if all(keys.get(key) is None for key in _TABLES):
        keys = Keys({**keys.table, "rope_parameters": {**_ROPE, "rope_theta": keys.get("rope_theta")}})
    window = read_window(keys)
    default = tuple(window is not None and index % 4 > 0 for index in range(num_layers(keys)))
    return build(keys, layers=sliding_layers(keys, window, default), qkv_bias=False)


FAMILY = Family(("CwmForCausalLM",), decoder_config)
