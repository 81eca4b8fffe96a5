"""Mellum 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    SLIDING_THETA,
    WINDOW,
    GGUFArchitecture,
    GGUFKeys,
    dense_layers,
    layer_types,
)
from jaxserve.checkpoint.gguf.routing import SOFTMAX, fixed_router
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


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of windows, of the rope of both kinds of layers, and of experts."""
    fixed_router(keys, SOFTMAX)
    count, dense = config["num_hidden_layers"], dense_layers(keys, config)
    theta, kinds = config["rope_theta"], ["full_attention"] * count
    if keys.get(WINDOW):
        kinds = layer_types(keys, config, 4)
    return {
        "sliding_window": keys.integer(WINDOW) if keys.get(WINDOW) else None,
        "layer_types": kinds,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number(SLIDING_THETA, theta)},
        },
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(count)],
    }


FAMILY = Family(
    ("MellumForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("mellum", experts="required", config=_gguf_config),
)
