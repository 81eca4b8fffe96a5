"""Cohere 2 with experts, as Command A+."""

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
    dense_layers,
    layer_types,
    same_theta,
)
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families import cohere as command_r
from jaxserve.models.families import cohere2
from jaxserve.models.families._cohere_vision import cohere_vision
from jaxserve.models.families._common import MAX_LAYERS, num_layers, sliding_layers
from jaxserve.models.families._experts import COUNT_KEYS, MAX_SHARED, dense_or_sparse, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS = dict(
    cohere2.DEFAULTS,
    head_dim=128,
    num_experts=8,
    num_experts_per_tok=2,
    num_shared_experts=0,
    shared_expert_combination_strategy="average",
    expert_selection_fn="softmax",
    norm_topk_prob=True,
    prefix_dense_sliding_window_pattern=1,
    prefix_dense_intermediate_size=None,
    rms_norm_eps=None,
)
_WIDTH: Final = "intermediate_size"
_DENSE_WIDTH: Final = "prefix_dense_intermediate_size"
_DENSE_PERIOD: Final = "prefix_dense_sliding_window_pattern"
_COMBINATION: Final = "shared_expert_combination_strategy"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Cohere 2 with RMSNorm or LayerNorm, and experts in all layers but the first ones, which may rotate with full attention."""
    keys = Keys({**DEFAULTS, "sliding_window_pattern": 4, "first_k_dense_replace": 0, **hf})
    layers = dense_or_sparse(keys, _layers(keys), _experts(keys))
    rotates_dense = keys.integer(_DENSE_PERIOD, MAX_LAYERS) == 1
    layers = tuple(
        replace(layer, use_rope=layer.sliding_window is not None or (layer.experts is None and rotates_dense))
        for layer in layers
    )
    dense = {_WIDTH: keys.get(_DENSE_WIDTH)} if keys.get(_DENSE_WIDTH) is not None else {}
    own = replace(keys, table={**keys.table, **dense})
    is_rms = keys.get("rms_norm_eps") is not None
    config = command_r.cohere(own, layers, computed=COUNT_KEYS, eps_key="rms_norm_eps" if is_rms else "layer_norm_eps")
    return replace(config, norm_kind="rms") if is_rms else config


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which by default the last of every few has full attention; the first dense layers have a period of their
    own."""
    window, count = keys.integer("sliding_window", MAX_POSITION), num_layers(keys)
    dense = keys.integer("first_k_dense_replace", count, low=0)
    first, later = (keys.integer(key, MAX_LAYERS) for key in (_DENSE_PERIOD, "sliding_window_pattern"))
    periods = [*((index + 1) % first for index in range(dense)), *((i + 1) % later for i in range(count - dense))]
    return sliding_layers(keys, window, tuple(rest != 0 for rest in periods))


def _experts(keys: Keys) -> ExpertsConfig:
    keys.require("expert_selection_fn", "softmax", "sigmoid")
    keys.require(_COMBINATION, "average", "sum")
    is_sigmoid = keys.get("expert_selection_fn") == "sigmoid"
    # The softmax is that of the chosen experts.
    is_normalized = keys.flag("norm_topk_prob") or not is_sigmoid
    experts = read_experts(keys, "num_experts", _WIDTH, is_normalized=is_normalized)
    experts = replace(experts, score="sigmoid" if is_sigmoid else "softmax")
    num_shared = keys.integer("num_shared_experts", MAX_SHARED, low=0)
    if not num_shared:
        return experts
    return replace(
        experts,
        shared_intermediate_size=experts.intermediate_size * num_shared,
        sum_scale=0.5 if keys.get(_COMBINATION) == "average" else 1.0,
    )


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of windows, experts and norms, which are RMSNorm if the file has its epsilon. The width of dense layers is that
    of their tensors."""
    check_gating(keys, SIGMOID)
    same_theta(keys, config)
    if not isinstance(keys.get(WINDOW_PATTERN), list):
        keys.fail(WINDOW_PATTERN, "true or false for each layer", keys.get(WINDOW_PATTERN))
    dense, rms = dense_layers(keys, config), "attention.layer_norm_rms_epsilon"
    first = keys.file.tensors.get(f"blk.{dense[0]}.ffn_gate.weight") if dense else None
    return {
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.integer(WINDOW),
        "layer_types": layer_types(keys, config, 4),
        "rms_norm_eps": keys.number(rms) if keys.get(rms) else None,
        **({} if keys.get(rms) else {"layer_norm_eps": keys.number("attention.layer_norm_epsilon")}),
        _WIDTH: keys.integer("expert_feed_forward_length"),
        _DENSE_WIDTH: None if first is None else first.shape[0],
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(config["num_hidden_layers"])],
        "num_shared_experts": keys.integer("expert_shared_count", 0, minimum=0),
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "expert_selection_fn": "sigmoid",
    }


FAMILY = Family(
    ("Cohere2MoeForCausalLM",),
    decoder_config,
    text_part_of=("Cohere2VisionForConditionalGeneration",),
    read_vision=cohere_vision,
    text_model_types=("cohere2_moe",),
    gguf=GGUFArchitecture("cohere2moe", eps_key=None, experts="required", config=_gguf_config),
)
