"""Flint (Recursive)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_WIDTH, build, num_layers, sliding_layers
from jaxserve.models.families._experts import COUNT_KEYS, read_experts, some_with_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

_SHARED: Final = "shared_expert_intermediate_size"
_DENSE: Final = "mlp_only_layers"
DEFAULTS = {
    **COMMON_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "sliding_window": 513,
    "decoder_sparse_step": 1,
    _DENSE: None,
    "moe_intermediate_size": 512,
    _SHARED: 1024,
    "num_experts": 256,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
}
_PERIOD: Final = 4


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Attention sinks, rope in layers with a window only, and sigmoid-routed experts with a shared one in all layers but the first two."""
    keys = Keys({**DEFAULTS, **hf})
    count = num_layers(keys)
    if keys.get(_DENSE) is None:
        keys = Keys({**keys.table, _DENSE: [*range(min(2, count))]})
    experts = replace(
        read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob")),
        score="sigmoid",
        shared_intermediate_size=keys.integer(_SHARED, MAX_WIDTH),
    )
    default = tuple(index not in (0, count - 1) and index % _PERIOD != 1 for index in range(count))
    layers = sliding_layers(keys, keys.integer("sliding_window", MAX_POSITION), default)
    layers = tuple(replace(layer, use_rope=layer.sliding_window is not None) for layer in layers)
    config = build(keys, layers=some_with_experts(keys, layers, experts), computed=(*COUNT_KEYS, _SHARED))
    return replace(config, qk_norm="heads", norm_weights="wide", sinks="all")


FAMILY = Family(
    ("FlintForCausalLM",),
    decoder_config,
    renames={"softmax_offset": "sinks", "shared_expert": "shared_experts"},
)
