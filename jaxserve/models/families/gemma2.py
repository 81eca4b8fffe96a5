"""Gemma 2 (arXiv 2408.00118)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    SANDWICH_NORMS,
    WINDOW,
    GGUFArchitecture,
    GGUFKeys,
    layer_types,
    same_theta,
)
from jaxserve.checkpoint.maxtext.layout import SANDWICH_NORM_NAMES, MaxTextLayout
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _gemma
from jaxserve.models.families._gemma import gemma, gemma_gguf_config
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._paligemma import paligemma

DEFAULTS = dict(_gemma.DEFAULTS, rope_theta=10_000.0, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma with full attention in every second layer, and capped scores and logits."""
    return gemma(Keys({**DEFAULTS, **hf}), pattern=2)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    same_theta(keys, config)
    return gemma_gguf_config(config, num_layers_of_27b=46) | {
        "sliding_window": keys.integer(WINDOW, 4096),
        "layer_types": layer_types(keys, config, 2),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


FAMILY = Family(
    ("Gemma2ForCausalLM",),
    decoder_config,
    text_part_of=("PaliGemmaForConditionalGeneration",),
    text_model_types=("gemma2",),
    read_vision=paligemma,
    gguf=GGUFArchitecture("gemma2", norm_offset=1.0, tensor_names=SANDWICH_NORMS, config=_gguf_config),
    maxtext=MaxTextLayout(
        SANDWICH_NORM_NAMES,
        norm_offset=1.0,
        query_scale="query_pre_attn_scalar",
        embedding_divisor="float32",
        pair=("_local", "_global"),
    ),
)
