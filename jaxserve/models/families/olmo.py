"""OLMo (arXiv 2402.00838)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import CLIP, GGUFArchitecture, GGUFKeys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers
from jaxserve.models.families._keys import Keys

_CLIP: Final = "clip_qkv"
_EPS: Final = "layer_norm_eps"
DEFAULTS = {key: value for key, value in COMMON_DEFAULTS.items() if key != "rms_norm_eps"} | {
    "attention_bias": False,
    _CLIP: None,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with LayerNorms without weights, and perhaps clipped queries, keys and values."""
    keys = Keys({**DEFAULTS, _EPS: 1e-5, **hf})
    keys.require(_EPS, 1e-5)  # no key of transformers
    config = build(keys, layers=full_layers(keys), computed=(_CLIP,), eps_key=_EPS)
    clip = None if keys.get(_CLIP) is None else keys.number(_CLIP)
    return replace(config, norm_kind="layer", norm_weights="none", qkv_clip=clip)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {_CLIP: keys.number(CLIP) if keys.get(CLIP) else None}


FAMILY = Family(
    ("OlmoForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("olmo", is_rope_permuted=True, eps_key=_EPS, config=_gguf_config),
)
