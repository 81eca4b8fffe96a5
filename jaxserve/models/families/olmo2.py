"""OLMo 2 (arXiv 2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import POST_NORMS, WINDOW, GGUFArchitecture, GGUFKeys, layer_types
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(COMMON_DEFAULTS, rms_norm_eps=1e-5, attention_bias=False)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with post-norms, and norms over all query heads and all key heads together."""
    keys = Keys({**DEFAULTS, **hf})
    return olmo(keys, full_layers(keys))


def olmo(keys: Keys, layers: tuple[LayerConfig, ...], *computed: str) -> DecoderConfig:
    """Build the features that OLMo 2, OLMo 3 and FlexOlmo share. computed: see `build`."""
    config = build(keys, layers=layers, computed=computed)
    return replace(config, norm_placement="post", norm_weights="wide", qk_norm="whole")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read an olmo2 file with a window as OLMo 3, which scales rope in layers with full attention only."""
    if not keys.get(WINDOW):
        return {}
    theta = config["rope_theta"]
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": keys.integer(WINDOW),
        "layer_types": layer_types(keys, config, 4),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": theta},
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", theta)},
        },
        "rope_scaling": None,
    }


FAMILY = Family(
    ("Olmo2ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "olmo2",
        tensor_names=POST_NORMS,
        attention_factor_keys=("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"),
        config=_gguf_config,
    ),
)
