"""Qwen3.5 and Qwen3.6 with experts, as Qwen3.6-35B-A3B: the text part of their checkpoints, and their tower."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.delta_net import TENSOR_NAMES
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._experts import all_with_experts, read_qwen_experts
from jaxserve.models.families._hybrid import QWEN_DEFAULTS, QWEN_SIZES, qwen_hybrid, qwen_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._vision import QWEN3_5_SECTIONS, qwen_vision
from jaxserve.models.families.qwen3_5 import gguf_config

DEFAULTS = dict(
    QWEN_DEFAULTS,
    num_key_value_heads=2,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
)
_SIZES: Mapping[str, Any] = {
    **QWEN_SIZES,
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
}
"""Defaults of further keys that published multimodal configs may leave out."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3.5 with experts and a gated shared expert in every layer."""
    keys = without_sections(Keys({**DEFAULTS, **_SIZES, **hf}))
    experts = read_qwen_experts(keys, is_normalized=True)
    # No layer is dense, so the width of dense layers is that of experts in name only.
    keys = Keys({**keys.table, "intermediate_size": experts.intermediate_size})
    return qwen_hybrid(keys, all_with_experts(qwen_layers(keys, "by_part"), experts))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the dense models, and the width of experts."""
    return {
        **gguf_config(keys, config),
        "moe_intermediate_size": config["intermediate_size"],
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }


FAMILY = Family(
    ("Qwen3_5MoeForCausalLM",),
    decoder_config,
    text_part_of=("Qwen3_5MoeForConditionalGeneration",),
    read_vision=partial(qwen_vision, sections=QWEN3_5_SECTIONS),
    renames={"shared_expert": "shared_experts"},
    stacked_experts="halves",
    mtp="module",
    gguf=GGUFArchitecture(
        "qwen35moe",
        has_partial_rotary=True,
        norm_offset=1.0,
        tensor_names=TENSOR_NAMES,
        experts="required",
        width_key="expert_feed_forward_length",
        config=_gguf_config,
    ),
)
