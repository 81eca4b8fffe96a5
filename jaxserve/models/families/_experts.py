"""Keys that families with experts share: number and width of experts, and the layers that have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from jaxserve.model_config.decoder import LayerConfig
from jaxserve.model_config.experts import ClampedGate, ExpertsConfig
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH, listed_layers
from jaxserve.models.families._keys import Keys

COUNT_KEYS = ("num_experts", "num_local_experts")
"""Keys for the number of experts: transformers reads either."""
PART_NAMES: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Our names of the matrices of a feed-forward block by Llama's first ones."""
MAX_EXPERTS = 4096
"""Far above every published model."""
MAX_SHARED = 64
"""Shared experts, of which no published model has more than a few."""


def read_experts(keys: Keys, count_key: str, width_key: str, *, is_normalized: bool) -> ExpertsConfig:
    """Read the keys that all families share. count_key: the family's key for E, which has the default. width_key: the
    key for F. Keys that only matter in training are ignored."""
    given = [key for key in COUNT_KEYS if key != count_key and keys.get(key) is not None]
    num_experts = keys.integer(given[0] if given else count_key, MAX_EXPERTS)
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=keys.integer("num_experts_per_tok", num_experts),
        intermediate_size=keys.integer(width_key, MAX_WIDTH),
        is_normalized=is_normalized,
    )


def some_with_experts(keys: Keys, layers: tuple[LayerConfig, ...], experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Add experts to every `decoder_sparse_step`-th layer except those of `mlp_only_layers`."""
    step, dense = keys.integer("decoder_sparse_step", MAX_LAYERS), listed_layers(keys, "mlp_only_layers", len(layers))
    return tuple(
        replace(layer, experts=experts) if (index + 1) % step == 0 and index not in dense else layer
        for index, layer in enumerate(layers)
    )


def all_with_experts(layers: tuple[LayerConfig, ...], experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Add experts to every layer."""
    return tuple(replace(layer, experts=experts) for layer in layers)


def dense_first(
    keys: Keys, layers: tuple[LayerConfig, ...], experts: ExpertsConfig, key: str = "first_k_dense_replace"
) -> tuple[LayerConfig, ...]:
    """Add experts to every layer after the first ones. key: the family's key for their number."""
    count = keys.integer(key, len(layers), low=0)
    return (*layers[:count], *all_with_experts(layers[count:], experts))


def dense_or_sparse(keys: Keys, layers: tuple[LayerConfig, ...], experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Add experts to the layers that `mlp_layer_types` calls sparse, or else to all after `first_k_dense_replace` or 1."""
    names = keys.get("mlp_layer_types")
    if names is None:
        return dense_first(Keys({"first_k_dense_replace": 1, **keys.table}, keys.prefix), layers, experts)
    if not isinstance(names, list) or len(names) != len(layers) or not {*names} <= {"dense", "sparse"}:
        raise keys.error("mlp_layer_types", f"dense or sparse for each of the {len(layers)} layers")
    return tuple(
        replace(layer, experts=experts) if name == "sparse" else layer
        for layer, name in zip(layers, names, strict=True)
    )


def read_qwen_experts(keys: Keys, *, is_normalized: bool) -> ExpertsConfig:
    """Read Qwen's experts with softmax routers, and a gated shared one of a width of its own."""
    return replace(
        read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=is_normalized),
        shared_intermediate_size=keys.integer("shared_expert_intermediate_size", MAX_WIDTH),
        has_shared_gate=True,
    )


def read_routed_experts(keys: Keys, count_key: str, shared_key: str) -> ExpertsConfig:
    """Read experts with DeepSeek-V3's router, and the shared ones. count_key, shared_key: the family's keys for their numbers."""
    experts = read_experts(keys, count_key, "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    return with_shared(keys, with_sigmoid_router(keys, experts), shared_key)


def with_shared(keys: Keys, experts: ExpertsConfig, shared_key: str) -> ExpertsConfig:
    """Add shared experts, each as wide as a routed one. shared_key: the family's key for their number."""
    return replace(experts, shared_intermediate_size=experts.intermediate_size * keys.integer(shared_key, MAX_SHARED))


def with_sigmoid_router(keys: Keys, experts: ExpertsConfig) -> ExpertsConfig:
    """Add DeepSeek-V3's router: sigmoid scores, a correction bias, groups of experts and a factor on the weights."""
    return replace(
        read_groups(keys, experts),
        score="sigmoid",
        has_correction_bias=True,
        weight_scale=keys.number("routed_scaling_factor"),
    )


def with_clamp(keys: Keys, experts: ExpertsConfig) -> ExpertsConfig:
    """Add the bound `swiglu_limit` of gates, before SiLU, and of what they are multiplied with."""
    return replace(experts, clamp=ClampedGate(keys.number("swiglu_limit"), slope=1.0, offset=0.0))


def read_groups(keys: Keys, experts: ExpertsConfig) -> ExpertsConfig:
    """Add the groups of experts of which each token chooses some first."""
    num_groups = keys.integer("n_group", experts.num_experts)
    if experts.num_experts % num_groups or experts.num_experts < 2 * num_groups:
        raise keys.error("n_group", f"a divisor of the {experts.num_experts} experts, at least two to a group")
    num_groups_per_token = keys.integer("topk_group", num_groups)
    if experts.num_per_token > num_groups_per_token * (experts.num_experts // num_groups):
        raise keys.error("topk_group", f"groups with at least num_experts_per_tok ({experts.num_per_token}) experts")
    return replace(experts, num_groups=num_groups, num_groups_per_token=num_groups_per_token)
