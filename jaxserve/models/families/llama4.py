"""Llama 4, the text models and the text part of its multimodal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    WINDOW,
    WINDOW_PATTERN,
    GGUFArchitecture,
    GGUFKeys,
    decimal,
    same_theta,
)
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.rope import QueryScaling
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_LAYERS, MAX_WIDTH, build, listed_layers, num_layers
from jaxserve.models.families._experts import COUNT_KEYS, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._llama4_vision import llama4_vision
from jaxserve.models.families._rope import MAX_POSITION
from jaxserve.models.families.smollm3 import rope_layers

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    attention_bias=False,
    num_local_experts=16,
    num_experts_per_tok=1,
    use_qk_norm=True,
    no_rope_layer_interval=4,
    attention_chunk_size=8192,
    attn_temperature_tuning=True,
    attn_scale=0.1,
    floor_scale=8192,
    interleave_moe_layer_step=1,
    moe_layers=None,
    intermediate_size_mlp=16_384,
)
_CHUNKED: Final = "chunked_attention"
_GGUF_FIXED: Final[Mapping[str, float]] = {
    WINDOW: 8192,
    WINDOW_PATTERN: 4,
    "attention.temperature_length": 8192,
    "attention.temperature_scale": 0.1,
}
"""Values that llama.cpp uses for every file: the chunk, the period of layers without rope, and the growth of queries."""
_WITHOUT_QK_NORM: Final = 128
"""Number of experts of Maverick, which has no norms of queries and keys; no key of a GGUF file says so."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Layers that rotate attend to their chunk, the others to all with queries that grow; one expert beside a shared one."""
    keys = Keys({**DEFAULTS, "max_position_embeddings": 131_072, "intermediate_size": 8192, **hf})
    experts = read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=False)
    experts = replace(experts, score="sigmoid", scales_inputs=True, shared_intermediate_size=experts.intermediate_size)
    dense = Keys({**keys.table, "intermediate_size": keys.integer("intermediate_size_mlp", MAX_WIDTH)})
    config = build(dense, layers=_layers(keys, experts), computed=COUNT_KEYS)
    return replace(
        config,
        rotary_pairs="adjacent",
        qk_norm="rotated_unit" if keys.flag("use_qk_norm") else "none",
        query_scaling=_query_scaling(keys),
    )


def _layers(keys: Keys, experts: ExpertsConfig) -> tuple[LayerConfig, ...]:
    rotates = rope_layers(Keys({**keys.table, "no_rope_layers": keys.get("no_rope_layers") or None}))
    chunk = None if keys.get("attention_chunk_size") is None else keys.integer("attention_chunk_size", MAX_POSITION)
    sparse = _sparse(keys)
    return tuple(
        LayerConfig(
            sliding_window=chunk if is_chunked else None,
            is_chunked=is_chunked,
            use_rope=use_rope,
            experts=experts if index in sparse else None,
        )
        for index, (use_rope, is_chunked) in enumerate(zip(rotates, _chunked(keys, chunk, rotates), strict=True))
    )


def _chunked(keys: Keys, chunk: int | None, rotates: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return True for each layer whose queries attend to their chunk: by default those that rotate."""
    names = keys.get("layer_types")
    if names is None:
        return rotates if chunk is not None else (False,) * len(rotates)
    known = ("full_attention",) if chunk is None else ("full_attention", _CHUNKED)
    if not isinstance(names, list) or len(names) != len(rotates) or any(name not in known for name in names):
        raise keys.error("layer_types", f"{' or '.join(known)} for each of the {len(rotates)} layers")
    return tuple(name == _CHUNKED for name in names)


def _sparse(keys: Keys) -> frozenset[int]:
    """Return the layers with experts."""
    count = num_layers(keys)
    if keys.get("moe_layers") is None:
        step = keys.integer("interleave_moe_layer_step", MAX_LAYERS)
        return frozenset(range(step - 1, count, step))
    return frozenset(listed_layers(keys, "moe_layers", count))


def _query_scaling(keys: Keys) -> QueryScaling | None:
    """Read the factor on queries of layers without rope. Older files have a number for true."""
    if not keys.get("attn_temperature_tuning"):
        return None
    period = keys.integer("floor_scale", MAX_POSITION)
    return QueryScaling(keys.number("attn_scale"), period, offset=1, only_without_rope=True)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return widths, the layers with experts, and what llama.cpp hard-codes and no key carries."""
    for key, value in _GGUF_FIXED.items():
        if keys.has(key) and decimal(keys.get(key)) != value:
            keys.fail(key, f"{value:g} or none", keys.get(key))
    same_theta(keys, config)
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "use_qk_norm": config["num_experts"] != _WITHOUT_QK_NORM,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


FAMILY = Family(
    ("Llama4ForCausalLM",),
    decoder_config,
    text_part_of=("Llama4ForConditionalGeneration",),
    read_vision=llama4_vision,
    renames={"feed_forward": "mlp", "shared_expert": "shared_experts", "router": "gate"},
    stacked_experts="halves_by_inputs",
    gguf=GGUFArchitecture("llama4", experts="required", config=_gguf_config),
)
