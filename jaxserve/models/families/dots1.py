"""dots.llm1 (arXiv 2506.05767)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_LAYERS, build, num_layers, read_window, sliding_layers
from jaxserve.models.families._experts import COUNT_KEYS, dense_first, read_routed_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=32,
    attention_bias=False,
    sliding_window=4096,
    max_window_layers=62,
    moe_intermediate_size=1408,
    n_routed_experts=None,
    n_shared_experts=None,
    num_experts_per_tok=None,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=0,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Norms of query and key heads, and sigmoid-routed and shared experts after the first dense layers.

    Layers from `max_window_layers` on, or those in `layer_types`, have a sliding window.
    """
    keys = Keys({**DEFAULTS, **hf})
    experts = read_routed_experts(keys, "n_routed_experts", "n_shared_experts")
    window, first = read_window(keys), keys.integer("max_window_layers", MAX_LAYERS, low=0)
    default = tuple(window is not None and index >= first for index in range(num_layers(keys)))
    layers = dense_first(keys, sliding_layers(keys, window, default), experts)
    return replace(build(keys, layers=layers, computed=(*COUNT_KEYS, "n_shared_experts")), qk_norm="heads")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the router's keys; raise CheckpointError for a window or for scores that are no sigmoid."""
    check_gating(keys, SIGMOID)
    routing = router_config(keys, config)
    return {**no_window(keys, config), **routing, "n_routed_experts": config["num_experts"]}


FAMILY = Family(
    ("Dots1ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture("dots1", experts="required", config=_gguf_config),
)
