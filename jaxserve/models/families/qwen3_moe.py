"""Qwen3 with experts (arXiv 2505.09388), as Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, dense_layers, no_window
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers
from jaxserve.models.families._experts import COUNT_KEYS, read_experts, some_with_experts
from jaxserve.models.families._internvl import internvl
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=4,
    attention_bias=False,
    use_sliding_window=False,
    sliding_window=4096,
    decoder_sparse_step=1,
    mlp_only_layers=None,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3 with experts in every `decoder_sparse_step`-th layer except those of `mlp_only_layers`.

    With `use_sliding_window` every layer has a window.
    """
    given = Keys({**DEFAULTS, **hf})
    keys = given if given.flag("use_sliding_window") else Keys({**given.table, "sliding_window": None})
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    layers = some_with_experts(keys, uniform_layers(keys), experts)
    config = build(keys, layers=layers, computed=COUNT_KEYS)
    return replace(config, qk_norm="heads")


def gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of experts, and that weights sum to 1, which llama.cpp hard-codes and no key carries."""
    return no_window(keys, config) | {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "mlp_only_layers": dense_layers(keys, config),
        "norm_topk_prob": True,
    }


FAMILY = Family(
    ("Qwen3MoeForCausalLM",),
    decoder_config,
    text_part_of=("InternVLForConditionalGeneration",),
    text_model_types=("qwen3_moe",),
    read_vision=internvl,
    gguf=GGUFArchitecture("qwen3moe", experts="required", config=gguf_config),
)
