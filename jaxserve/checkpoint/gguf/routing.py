"""Routers as DeepSeek-V3's in GGUF files: metadata of their experts, groups and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.gguf.architecture import GGUFKeys

SOFTMAX: Final = 1
SIGMOID: Final = 2
_GATINGS: Final[Mapping[int, str]] = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
GATING: Final = "expert_gating_func"
"""Key of the function from a router's logits to scores. Files without it or with 0 are older than the key."""
_WEIGHTS_NORM, _WEIGHTS_SCALE = "expert_weights_norm", "expert_weights_scale"
_GROUPS, _USED_GROUPS = "expert_group_count", "expert_group_used_count"
_PUBLISHED_GROUPS: Final[Mapping[tuple[int, int], tuple[int, int]]] = {(60, 160): (8, 3), (61, 256): (8, 4)}
"""Groups, and groups of a token, of DeepSeek-V2 and V3 by their numbers of layers and experts: older files lack the keys."""


def check_gating(keys: GGUFKeys, gating: int) -> None:
    """Raise CheckpointError if a router's scores have another function than `gating`."""
    if (keys.get(GATING) or gating) != gating:
        keys.fail(GATING, f"{gating} ({_GATINGS[gating]}) or none", keys.get(GATING))


def fixed_router(keys: GGUFKeys, gating: int) -> None:
    """Raise CheckpointError if scores have another function than `gating`, or weights do not sum to 1: what llama.cpp has hard-coded
    for an architecture."""
    check_gating(keys, gating)
    if keys.get(_WEIGHTS_NORM) is False:
        keys.fail(_WEIGHTS_NORM, "true or none", False)
    if keys.number(_WEIGHTS_SCALE, 1.0) != 1.0:
        keys.fail(_WEIGHTS_SCALE, "1 or none", keys.get(_WEIGHTS_SCALE))


def router_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for experts after the first dense layers, shared experts, groups and weights.

    config: the keys that all files have. Raises CheckpointError for a value out of range.
    """
    sizes = config["num_hidden_layers"], config["num_experts"]
    published = (1, 1) if keys.has(_GROUPS) else _PUBLISHED_GROUPS.get(sizes, (1, 1))
    num_groups = keys.integer(_GROUPS, published[0])
    used_groups = keys.integer(_USED_GROUPS, num_groups if keys.has(_GROUPS) else published[1], maximum=num_groups)
    return {
        "first_k_dense_replace": keys.integer(
            "leading_dense_block_count", 0, minimum=0, maximum=config["num_hidden_layers"]
        ),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "n_group": num_groups,
        "topk_group": used_groups,
        "norm_topk_prob": keys.flag(_WEIGHTS_NORM),
        "routed_scaling_factor": keys.number(_WEIGHTS_SCALE, 1.0),
    }
