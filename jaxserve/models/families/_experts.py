"""What the families with experts share: how their config says how many there are, and in which layers."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.model_config.decoder import LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH
from jaxserve.models.families._keys import Keys

COUNT_KEYS = ("num_experts", "num_local_experts")
"""Two spellings of one number: transformers reads either."""
_MAX_EXPERTS = 4096
"""Far above every published model."""


def read_experts(keys: Keys, count_key: str, width_key: str, *, is_normalized: bool) -> ExpertsConfig:
    """count_key: the family's own spelling of how many there are, which has the default. width_key: where the width of
    each stands. What makes a router learn well changes nothing here."""
    for key in ("n_shared_experts", "shared_expert_intermediate_size"):
        keys.require(key, 0, None)
    (other,) = set(COUNT_KEYS) - {count_key}
    num_experts = keys.integer(count_key if keys.get(other) is None else other, _MAX_EXPERTS)
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=keys.integer("num_experts_per_tok", num_experts),
        intermediate_size=keys.integer(width_key, MAX_WIDTH),
        is_normalized=is_normalized,
    )


def some_with_experts(keys: Keys, layers: tuple[LayerConfig, ...], experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Every `decoder_sparse_step`-th layer, but those of `mlp_only_layers`."""
    step, dense = keys.integer("decoder_sparse_step", MAX_LAYERS), keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or index not in range(len(layers)) for index in dense):
        raise keys.refusal("mlp_only_layers", f"a list of layers from 0 to {len(layers) - 1}")
    return tuple(
        replace(layer, experts=experts) if (index + 1) % step == 0 and index not in dense else layer
        for index, layer in enumerate(layers)
    )


def all_with_experts(layers: tuple[LayerConfig, ...], experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    """Every layer."""
    return tuple(replace(layer, experts=experts) for layer in layers)
