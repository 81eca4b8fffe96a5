"""Phi-3, Phi-3.5 and Phi-4, the dense models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import WINDOW, GGUFArchitecture, GGUFKeys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(COMMON_DEFAULTS, rms_norm_eps=1e-5, original_max_position_embeddings=4096, sliding_window=None)
_LONGROPE = ("su", "yarn")
"""Names of longrope in early configs."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama without biases, with one window for all layers, partial rotation (Phi-4-mini) and longrope."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("attention_bias", False, None)
    layers = uniform_layers(keys)
    return build(_renamed(keys), layers=layers, qkv_bias=False, computed=("partial_rotary_factor",))


def _renamed(keys: Keys) -> Keys:
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    table = keys.get(name)
    if not isinstance(table, dict):
        return keys
    if (table.get("rope_type") or table.get("type")) in _LONGROPE:
        table = {**table, "rope_type": "longrope"}
    Keys(table, f"{name}.").require("rope_type", "default", "longrope", None)
    Keys(table, f"{name}.").require("type", "default", "longrope", *_LONGROPE, None)
    return Keys({**keys.table, name: table}, keys.prefix)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"sliding_window": keys.integer(WINDOW) if keys.get(WINDOW) else None}
    original = (config.get("rope_scaling") or {}).get("original_max_position_embeddings")
    return own if original is None else own | {"original_max_position_embeddings": original}  # the outer key wins


FAMILY = Family(
    ("Phi3ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "phi3",
        has_partial_rotary=True,
        tensor_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config=_gguf_config,
    ),
)
