"""Mellum 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, num_layers, read_window, sliding_layers
from jaxserve.models.families._experts import COUNT_KEYS, dense_or_sparse, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_layer_type

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=4,
    head_dim=128,
    attention_bias=False,
    sliding_window=1024,
    moe_intermediate_size=896,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=True,
)
_THETAS = {"full_attention": {"rope_theta": 500_000.0}, "sliding_attention": {"rope_theta": 10_000.0}}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3 with experts, a window in the layers that `layer_types` names, and another rope base in those."""
    table = {**DEFAULTS, **hf}
    table["rope_parameters"] = table.get("rope_parameters") or _THETAS
    table["mlp_layer_types"] = table.get("mlp_layer_types") or ["sparse"] * num_layers(Keys(table))
    keys, sliding_theta = by_layer_type(Keys(table), 10_000.0)
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    layers = sliding_layers(keys, read_window(keys), (False,) * num_layers(keys))
    config = build(keys, layers=dense_or_sparse(keys, layers, experts), computed=COUNT_KEYS)
    return replace(config, qk_norm="heads", sliding_rope_theta=sliding_theta)


FAMILY = Family(("MellumForCausalLM",), decoder_config)
