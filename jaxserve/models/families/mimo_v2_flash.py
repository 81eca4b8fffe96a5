"""MiMo-V2-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    KV_HEADS,
    SINKS,
    SLIDING_THETA,
    WINDOW,
    GGUFArchitecture,
    GGUFKeys,
    dense_layers,
    layer_types,
)
from jaxserve.checkpoint.gguf.per_layer import by_layer
from jaxserve.checkpoint.gguf.routing import SIGMOID, fixed_router
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import (
    COMMON_DEFAULTS,
    MAX_HEADS,
    build,
    num_layers,
    sliding_layers,
)
from jaxserve.models.families._experts import COUNT_KEYS, dense_or_sparse, read_experts, with_sigmoid_router
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION, by_layer_type

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=4,
    head_dim=192,
    v_head_dim=128,
    rms_norm_eps=1e-5,
    attention_bias=False,
    attention_value_scale=0.707,
    sliding_window=129,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
)
_FRACTION: Final = 0.334
_FULL_THETA: Final = 5_000_000.0
_KV_HEADS: Final = "num_key_value_heads"
_SAME_IN_WINDOWS: Final = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}
"""Sizes of sliding-window layers that must be those of the others."""
_MTP_KEYS: Final = {
    "layer_types": ["sliding_attention"],
    "mlp_layer_types": ["dense"],
    "hybrid_layer_pattern": None,
    "moe_layer_freq": None,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Values of fewer numbers than keys, twice the KV heads and attention sinks in layers with a window, partial rotation, and
    sigmoid-routed experts in all layers but the first."""
    keys = _keys(hf)
    keys, sliding_theta = by_layer_type(keys, keys.number("swa_rope_theta", low=1.0), fraction=_FRACTION)
    experts = read_experts(keys, "n_routed_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    layers = dense_or_sparse(keys, _layers(keys), with_sigmoid_router(keys, experts))
    config = build(
        keys,
        layers=layers,
        qkv_bias=keys.flag("attention_bias"),
        computed=(*COUNT_KEYS, "partial_rotary_factor"),
    )
    scale = "attention_value_scale"
    return replace(
        config,
        value_dim=keys.integer("v_head_dim", config.head_dim),
        value_scale=1.0 if keys.get(scale) is None else keys.number(scale),
        sinks="windows",
        sliding_rope_theta=sliding_theta,
    )


def _keys(hf: dict[str, Any]) -> Keys:
    """Return the config with defaults. Keys that the published config has and transformers ignores must say what it computes."""
    given = {key: value for key, value in hf.items() if key != "routed_scaling_factor" or value is not None}
    if "layernorm_epsilon" in given:
        given = {"rms_norm_eps": given["layernorm_epsilon"], **given}
    keys = Keys(
        {**DEFAULTS, "rope_theta": _FULL_THETA, "swa_rope_theta": 10_000.0, "partial_rotary_factor": _FRACTION, **given}
    )
    for name, same in _SAME_IN_WINDOWS.items():
        keys.require(name, keys.get(same), None)
    keys.require("swa_num_key_value_heads", 2 * keys.integer(_KV_HEADS, MAX_HEADS), None)
    keys.require("add_swa_attention_sink_bias", True, None)
    keys.require("add_full_attention_sink_bias", False, None)
    keys.require("n_shared_experts", 0, None)
    keys.require("scoring_func", "sigmoid", None)
    if keys.get("sliding_window_size") is None:
        return keys
    # The published config counts the tokens before the query.
    window = keys.integer("sliding_window_size", MAX_POSITION - 1) + 1
    return replace(keys, table={**keys.table, "sliding_window": window})


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which by default the first and every sixth have full attention."""
    window, count = keys.integer("sliding_window", MAX_POSITION), num_layers(keys)
    default = tuple(index > 0 and (index + 1) % 6 != 0 for index in range(count))
    keys.require("hybrid_layer_pattern", [int(is_sliding) for is_sliding in default], None)
    keys.require("moe_layer_freq", [0, *[1] * (count - 1)], None)
    heads, most = keys.integer(_KV_HEADS, MAX_HEADS), keys.integer("num_attention_heads", MAX_HEADS)
    layers = sliding_layers(keys, window, default)
    if any(layer.sliding_window is not None for layer in layers) and most % (2 * heads):
        raise keys.error(_KV_HEADS, f"half of a divisor of num_attention_heads ({most})")
    return tuple(layer if layer.sliding_window is None else replace(layer, num_kv_heads=2 * heads) for layer in layers)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of windows, heads and experts. Files older than the factor on values lack it: published models share it."""
    fixed_router(keys, SIGMOID)
    count, dense = config["num_hidden_layers"], dense_layers(keys, config)
    kinds, heads = layer_types(keys, config, 1), by_layer(keys, KV_HEADS, count)
    full = min(heads)
    if heads != [full if kind == "full_attention" else 2 * full for kind in kinds]:
        keys.fail(
            KV_HEADS, "one number for layers with full attention, and twice as many for those with a window", heads
        )
    scale = "attention.value_scale"
    return {
        _KV_HEADS: full,
        "layer_types": kinds,
        "sliding_window": keys.integer(WINDOW),
        "swa_rope_theta": keys.number(SLIDING_THETA, 10_000.0),
        "v_head_dim": keys.integer("attention.value_length", config["head_dim"], maximum=config["head_dim"]),
        "attention_value_scale": keys.number(scale) if keys.has(scale) else DEFAULTS["attention_value_scale"],
        "n_routed_experts": config["num_experts"],
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(count)],
    }


FAMILY = Family(
    ("MiMoV2FlashForCausalLM",),
    decoder_config,
    renames={"attention_sink_bias": "sinks"},
    mtp="mimo_v2",
    mtp_keys=lambda config: _MTP_KEYS,
    gguf=GGUFArchitecture(
        "mimo2",
        has_partial_rotary=True,
        varies_by_layer=True,
        has_narrow_values=True,
        tensor_names={"attn_sinks": SINKS},
        experts="required",
        config=_gguf_config,
    ),
)
