"""ERNIE 4.5 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, dense_layers, no_window
from jaxserve.checkpoint.gguf.routing import SOFTMAX, fixed_router
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families import ernie4_5
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH, full_layers
from jaxserve.models.families._experts import MAX_EXPERTS, MAX_SHARED
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    {key: value for key, value in ernie4_5.DEFAULTS.items() if key != "head_dim"},
    num_key_value_heads=4,
    moe_intermediate_size=1536,
    moe_k=6,
    moe_num_experts=64,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_layer_end_index=-1,
    moe_layer_interval=1,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """ERNIE 4.5 with softmax-routed experts, chosen with a correction bias, and shared ones, in most layers."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("use_bias", False)
    return ernie4_5.ernie(keys, _with_experts(keys, full_layers(keys), _experts(keys)))


def _experts(keys: Keys) -> ExpertsConfig:
    num_experts = keys.integer("moe_num_experts", MAX_EXPERTS)
    width, num_shared = keys.integer("moe_intermediate_size", MAX_WIDTH), 0
    if keys.get("moe_num_shared_experts") not in (0, None):
        num_shared = keys.integer("moe_num_shared_experts", MAX_SHARED)
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=keys.integer("moe_k", num_experts),
        intermediate_size=width,
        is_normalized=True,
        has_correction_bias=True,
        shared_intermediate_size=width * num_shared or None,
    )


def _with_experts(keys: Keys, layers: tuple[LayerConfig, ...], experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Add experts to every `moe_layer_interval`-th layer between two bounds, both included; -1 is the last layer."""
    first = keys.integer("moe_layer_start_index", MAX_LAYERS, low=0)
    last = keys.integer("moe_layer_end_index", MAX_LAYERS, low=-1) % len(layers)
    interval = keys.integer("moe_layer_interval", MAX_LAYERS)
    return tuple(
        replace(layer, experts=experts) if first <= index <= last and (index + 1) % interval == 0 else layer
        for index, layer in enumerate(layers)
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of experts; the tensors say which layers have them. Weights are not scaled, and biases are not known."""
    fixed_router(keys, SOFTMAX)
    dense = dense_layers(keys, config)
    sparse = [layer for layer in range(config["num_hidden_layers"]) if layer not in dense]
    return no_window(keys, config) | {
        "moe_num_experts": config["num_experts"],
        "moe_k": config["num_experts_per_tok"],
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
        "moe_layer_start_index": min(sparse, default=0),
        "moe_layer_end_index": max(sparse, default=0),
        "num_experts": None,
    }


FAMILY = Family(
    ("Ernie4_5_MoeForCausalLM",),
    decoder_config,
    renames={"moe_statics": "gate"},
    mtp="ernie",
    gguf=GGUFArchitecture("ernie4_5-moe", experts="required", config=_gguf_config),
)
