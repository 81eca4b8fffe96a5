"""AFMoE, as Arcee's Trinity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import (
    SANDWICH_NORMS,
    WINDOW,
    WINDOW_PATTERN,
    GGUFArchitecture,
    GGUFKeys,
    same_theta,
)
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_LAYERS, alternating_layers, build
from jaxserve.models.families._experts import COUNT_KEYS, dense_first, read_experts, with_shared
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS = dict(
    COMMON_DEFAULTS,
    head_dim=128,
    rms_norm_eps=1e-5,
    attention_bias=False,
    sliding_window=1024,
    global_attn_every_n_layers=4,
    mup_enabled=False,
    moe_intermediate_size=1408,
    num_dense_layers=1,
    num_experts=64,
    num_experts_per_tok=6,
    num_shared_experts=2,
    route_scale=1.0,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gated attention between sandwich norms, rope only in layers with a window, and sigmoid-routed and shared experts after the
    first dense layers."""
    keys = Keys({**DEFAULTS, **hf})
    keys.require("attention_bias", False)
    keys.require("score_func", "sigmoid", None)
    keys.require("route_norm", True, None)
    keys.require("n_group", 1, None)
    keys.integer("sliding_window", MAX_POSITION)
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=True)
    scale = keys.number("route_scale")
    experts = replace(experts, score="sigmoid", has_correction_bias=True, weight_scale=scale)
    experts = with_shared(keys, experts, "num_shared_experts")
    layers = alternating_layers(keys, keys.integer("global_attn_every_n_layers", MAX_LAYERS))
    layers = tuple(replace(layer, use_rope=layer.sliding_window is not None) for layer in layers)
    config = build(keys, layers=dense_first(keys, layers, experts, "num_dense_layers"), computed=COUNT_KEYS)
    return replace(
        config,
        qk_norm="heads",
        norm_placement="sandwich",
        norm_weights="wide",
        output_gate="apart",
        embedding_scale=config.hidden_size**0.5 if keys.flag("mup_enabled") else 1.0,
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of windows and of the router. llama.cpp multiplies embeddings with the root of their width, and gives every
    fourth layer full attention."""
    same_theta(keys, config)
    check_gating(keys, SIGMOID)
    routing = router_config(keys, config)
    return {
        "sliding_window": keys.integer(WINDOW),
        "global_attn_every_n_layers": keys.integer(WINDOW_PATTERN, 4),
        "mup_enabled": True,
        "moe_intermediate_size": routing["moe_intermediate_size"],
        "num_dense_layers": routing["first_k_dense_replace"],
        "num_shared_experts": routing["n_shared_experts"],
        "route_norm": routing["norm_topk_prob"],
        "route_scale": routing["routed_scaling_factor"],
        "n_group": routing["n_group"],
    }


FAMILY = Family(
    ("AfmoeForCausalLM",),
    decoder_config,
    renames={
        "mlp.router.gate": "mlp.gate",
        "expert_bias": "gate.e_score_correction_bias",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    gguf=GGUFArchitecture(
        "afmoe",
        tensor_names={**SANDWICH_NORMS, "attn_gate": "self_attn.gate_proj"},
        experts="required",
        config=_gguf_config,
    ),
)
