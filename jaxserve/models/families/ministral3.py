"""Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LOG_MULTIPLIER, WINDOW, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._rope import query_scaling

DEFAULTS = dict(COMMON_DEFAULTS, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, sliding_window=None)
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_FACTOR: Final = "attention.temperature_scale"
_STEP: Final = "attention.temperature_length"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Mistral with yarn, and queries that grow with the logarithm of their position."""
    keys = Keys({**DEFAULTS, **hf})
    if not keys.get("rope_parameters"):
        keys.require("rope_scaling", None)
        keys = Keys({**keys.table, "rope_parameters": _ROPE})
    keys.require("attention_bias", False, None)
    return replace(build(keys, layers=uniform_layers(keys), qkv_bias=False), query_scaling=query_scaling(keys))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file without a factor on queries as Mistral: converters give Mistral Small 3 and Devstral 2 the same name.

    With a logarithmic multiplier, which is 1 then, yarn leaves cos and sin as they are.
    """
    scaling = config.get("rope_scaling") or {}
    if keys.get(LOG_MULTIPLIER) and scaling.get("rope_type") == "yarn":
        scaling = {**scaling, "attention_factor": 1.0}
    if not keys.get(_FACTOR):
        return {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": keys.integer(WINDOW) if keys.get(WINDOW) else None,
            "rope_scaling": scaling or None,
        }
    if scaling.get("rope_type") != "yarn":
        keys.fail("rope.scaling.type", f"yarn beside '{_FACTOR}'", keys.get("rope.scaling.type"))
    original = scaling["original_max_position_embeddings"]
    if keys.get(_STEP) not in (None, original):
        keys.fail(_STEP, f"the original context length {original} or none", keys.get(_STEP))
    if not keys.has(LOG_MULTIPLIER):
        keys.fail(LOG_MULTIPLIER, "0 or 1", None)
    own = {"llama_4_scaling_beta": keys.number(_FACTOR)}
    return {**no_window(keys, config), "rope_scaling": None, "rope_parameters": {**scaling, **own}}


FAMILY = Family(
    ("Ministral3ForCausalLM",),
    decoder_config,
    text_part_of=("Mistral3ForConditionalGeneration",),
    read_vision=pixtral,
    text_model_types=("ministral3",),
    gguf=GGUFArchitecture("mistral3", is_rope_permuted=True, config=_gguf_config),
)
