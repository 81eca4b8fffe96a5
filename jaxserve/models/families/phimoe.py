"""Phi-3.5-MoE, and Phi-mini-MoE (arXiv 2409.12136)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import LAYER_NORM_NAMES, WINDOW, GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.routing import SOFTMAX, check_gating
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, uniform_layers
from jaxserve.models.families._experts import COUNT_KEYS, PART_NAMES, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    sliding_window=None,
    attention_bias=False,
    lm_head_bias=False,
    num_local_experts=16,
    num_experts_per_tok=2,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm, biases of attention and of the output head, one window for all layers, and two experts a token chosen by SparseMixer."""
    keys = _with_one_factor(Keys({**DEFAULTS, "router_jitter_noise": 0.01, **hf}))
    keys.require("num_experts_per_tok", 2)
    experts = replace(
        read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=False),
        score="sparse_mixer",
        margin=2 * keys.number("router_jitter_noise"),
    )
    config = build(keys, layers=all_with_experts(uniform_layers(keys), experts), computed=COUNT_KEYS)
    return replace(config, norm_kind="layer_with_bias", lm_head_bias=keys.flag("lm_head_bias"))


def _with_one_factor(keys: Keys) -> Keys:
    """Read longrope's factors on cos and sin, `short_mscale` and `long_mscale`, if they are the same."""
    for name in ("rope_scaling", "rope_parameters"):
        table = keys.get(name)
        if isinstance(table, dict) and "short_mscale" in table:
            inner = Keys(table, f"{name}.")
            factor = inner.number("short_mscale")
            inner.require("long_mscale", table["short_mscale"])
            return Keys({**keys.table, name: {**table, "attention_factor": factor}}, keys.prefix)
    return keys


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window, and whether the output head has a bias. Files lack the router's jitter, which both published models share."""
    check_gating(keys, SOFTMAX)
    return {"sliding_window": keys.get(WINDOW) or None, "lm_head_bias": "output.bias" in keys.file.tensors}


FAMILY = Family(
    ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    decoder_config,
    renames={"block_sparse_moe": "mlp", **PART_NAMES},
    gguf=GGUFArchitecture(
        "phimoe",
        has_bias_flags=True,
        top_names={**LAYER_NORM_NAMES, "output.bias": "lm_head.bias"},
        experts="required",
        config=_gguf_config,
    ),
)
