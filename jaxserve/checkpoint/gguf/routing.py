"""Routers as DeepSeek-V3's in GGUF files: metadata of their experts, groups and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.checkpoint.gguf.architecture import GGUFKeys

SOFTMAX: Final = 1
SIGMOID: Final = 2
GATING: Final = "expert_gating_func"
"""Key of the function from a router's logits to scores. Files without it or with 0 are older than the key."""
GROUPS: Final = "expert_group_count"


def router_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for experts after the first dense layers, shared experts, groups and weights.

    config: the keys that all files have. Raises CheckpointError for a value out of range.
    """
    num_groups = keys.integer(GROUPS, 1)
    return {
        "first_k_dense_replace": keys.integer(
            "leading_dense_block_count", 0, minimum=0, maximum=config["num_hidden_layers"]
        ),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "n_group": num_groups,
        "topk_group": keys.integer("expert_group_used_count", num_groups, maximum=num_groups),
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }
