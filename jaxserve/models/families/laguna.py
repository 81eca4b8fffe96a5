"""Laguna (Poolside)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    HEADS,
    KV_HEADS,
    SLIDING_THETA,
    WINDOW,
    WINDOW_PATTERN,
    GGUFArchitecture,
    GGUFKeys,
    dense_layers,
    layer_types,
)
from jaxserve.checkpoint.gguf.per_layer import by_layer
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig, OutputGate
from jaxserve.models.families._common import (
    COMMON_DEFAULTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_WIDTH,
    build,
    num_layers,
    sliding_layers,
)
from jaxserve.models.families._experts import COUNT_KEYS, dense_or_sparse, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION, by_fraction, by_layer_type

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    head_dim=128,
    attention_bias=False,
    sliding_window=512,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts=256,
    num_experts_per_tok=8,
    gating=True,
    moe_routed_scaling_factor=1.0,
    moe_router_logit_softcapping=0.0,
)
_ROPE: Final = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
_GATES: Final[dict[object, OutputGate]] = {True: "heads", "per-head": "heads", "per-element": "apart"}
_HEADS: Final = "num_attention_heads_per_layer"
_CAP: Final = "moe_router_logit_softcapping"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gates of softplus on the outputs of heads, whose number differs by layer, windows with a rotation of their own, and sigmoid-routed
    and shared experts in most layers."""
    keys = _keys(hf)
    gate = _gate(keys)
    cap = keys.get(_CAP)
    experts = replace(
        read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=True),
        score="sigmoid",
        has_correction_bias=True,
        weight_scale=keys.number("moe_routed_scaling_factor"),
        logit_softcap=None if cap in (0, None) else keys.number(_CAP),
        shared_intermediate_size=keys.integer("shared_expert_intermediate_size", MAX_WIDTH),
    )
    layers = dense_or_sparse(Keys({**keys.table, "first_k_dense_replace": 1}), _layers(keys), experts)
    keys, sliding_dim = by_fraction(keys, keys.integer("head_dim", MAX_HEAD_DIM, low=2))
    keys, sliding_theta = by_layer_type(keys, 10_000.0)
    config = build(
        keys,
        layers=layers,
        computed=(*COUNT_KEYS, "shared_expert_intermediate_size", "partial_rotary_factor"),
    )
    return replace(
        config,
        qk_norm="heads",
        output_gate=gate,
        gate_activation="softplus",
        sliding_rope_theta=sliding_theta,
        sliding_rotary_dim=sliding_dim,
    )


def _keys(hf: dict[str, Any]) -> Keys:
    """Return the config with defaults. Keys of other families that published configs have and transformers ignores must say what it computes."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("attention_bias", False)  # gates have none
    keys.require("qkv_bias", False, None)
    keys.require("norm_topk_prob", True, None)
    keys.require("moe_apply_router_weight_on_input", False, None)
    keys.require("swa_rope_parameters", None)
    if keys.get("mlp_layer_types") is None:
        keys.require("mlp_only_layers", [0], None)
        keys.require("decoder_sparse_step", 1, None)
    tables = keys.get("rope_parameters") or _ROPE
    if isinstance(tables, dict) and not any(isinstance(table, dict) for table in tables.values()):
        tables = {"full_attention": tables}
        if "sliding_attention" in (keys.get("layer_types") or ()):
            raise keys.error("rope_parameters", "tables full_attention and sliding_attention")
    return replace(keys, table={**keys.table, "rope_parameters": tables})


def _gate(keys: Keys) -> OutputGate:
    """Read the kind of the gates; `gating_types`, which transformers ignores, must say the same of each layer."""
    name = keys.get("gating")
    if not isinstance(name, bool | str) or name not in _GATES:
        raise keys.error("gating", "true, per-head, per-element")
    kind = "per_element" if _GATES[name] == "apart" else "per_head"
    keys.require("gating_types", [kind] * num_layers(keys), None)
    return _GATES[name]


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers without window if `layer_types` is absent, each with its number of query heads."""
    count, most = num_layers(keys), keys.integer("num_attention_heads", MAX_HEADS)
    layers = sliding_layers(keys, keys.integer("sliding_window", MAX_POSITION), (False,) * count)
    heads = [most] * count if keys.get(_HEADS) is None else keys.get(_HEADS)
    kv_heads = keys.integer("num_key_value_heads", MAX_HEADS)
    if not isinstance(heads, list) or len(heads) != count:
        raise keys.error(_HEADS, f"a list with one entry for each of the {count} layers")
    if any(Keys({_HEADS: each}, keys.prefix).integer(_HEADS, MAX_HEADS) % kv_heads for each in heads):
        raise keys.error(_HEADS, f"multiples of num_key_value_heads ({kv_heads})")
    return tuple(
        layer if own == most else replace(layer, num_heads=own) for layer, own in zip(layers, heads, strict=True)
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of heads, their gates, windows, rope and experts. The gates' kind follows from the rows of the first one."""
    check_gating(keys, SIGMOID)
    count, dense = config["num_hidden_layers"], dense_layers(keys, config)
    heads, kv_heads = by_layer(keys, HEADS, count), by_layer(keys, KV_HEADS, count)
    if len({*kv_heads}) > 1:
        keys.fail(KV_HEADS, "one number for all layers", kv_heads)
    gate, size = keys.file.tensors.get("blk.0.attn_gate.weight"), config["head_dim"]
    sliding_dim = keys.integer("rope.dimension_count_swa", size, minimum=2, maximum=size)
    full = {"rope_type": "default", **(config.get("rope_scaling") or {})}
    return {
        _HEADS: heads,
        "gating": "per-head" if gate is None or gate.shape[0] == heads[0] else "per-element",
        "layer_types": _gguf_kinds(keys, config),
        "sliding_window": keys.integer(WINDOW) if keys.get(WINDOW) else DEFAULTS["sliding_window"],
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {
                **full,
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": config["partial_rotary_factor"],
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number(SLIDING_THETA, config["rope_theta"]),
                # The factor is rounded down when read.
                "partial_rotary_factor": math.nextafter(sliding_dim / size, 1.0),
            },
        },
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale"),
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(count)],
    }


def _gguf_kinds(keys: GGUFKeys, config: Mapping[str, Any]) -> list[str]:
    """Return `layer_types`: without a list of them, the first of every four layers has full attention if there is a window."""
    if isinstance(keys.get(WINDOW_PATTERN), list):
        return layer_types(keys, config, 1)
    period = keys.integer(WINDOW_PATTERN, 4) if keys.get(WINDOW) else 1
    layers = range(config["num_hidden_layers"])
    return ["full_attention" if layer % period == 0 else "sliding_attention" for layer in layers]


FAMILY = Family(
    ("LagunaForCausalLM",),
    decoder_config,
    renames={
        "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        "shared_expert": "shared_experts",
        "g_proj": "gate_proj",
    },
    gguf=GGUFArchitecture(
        "laguna",
        has_partial_rotary=True,
        varies_by_layer=True,
        tensor_names={"attn_gate": "self_attn.gate_proj"},
        experts="required",
        attention_factor_keys=("rope.scaling.yarn_attn_factor",),
        config=_gguf_config,
    ),
)
