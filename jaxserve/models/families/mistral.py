"""Mistral 7B and its successors published as MistralForCausalLM, the text part of Mistral 3, Pixtral and some LLaVA models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers, with_sizes
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._llava import llava
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._vision import by_model_type

DEFAULTS = dict(COMMON_DEFAULTS, num_key_value_heads=8, head_dim=None, sliding_window=4096)
_SIZES: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 131_072,
}
"""transformers' defaults of further keys, which published LLaVA configs leave out."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama without biases; `sliding_window` applies to every layer and defaults to 4096 (null is none)."""
    keys = Keys({**DEFAULTS, **with_sizes(_SIZES, hf)})
    keys.require("attention_bias", False, None)
    return build(keys, layers=uniform_layers(keys), qkv_bias=False, computed=("is_causal",))


FAMILY = Family(
    ("MistralForCausalLM",),
    decoder_config,
    text_part_of=(
        "Mistral3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
    ),
    read_vision=by_model_type({"mistral3": pixtral, "llava": llava, "llava_next": llava, "vipllava": llava}),
    text_model_types=("mistral",),
    maxtext=MaxTextLayout(query_scale="head_dim", has_tied_logits=False),
)
