"""Kolibri 1 (Aleph Alpha)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_WIDTH, alternating_layers, build, read_window
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys

_SHARED = "shared_expert_intermediate_size"
DEFAULTS = {
    **COMMON_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 513,
    "moe_intermediate_size": 512,
    _SHARED: 512,
    "num_experts": 384,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
}
_PERIOD = 5


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Sandwich norms, rope in layers with a window only if there are some, and experts chosen by biased logits, with a shared one."""
    keys = Keys({**DEFAULTS, "intermediate_size": 1, **hf})  # which no layer has
    keys.require("attention_bias", False, None)
    experts = replace(
        read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob")),
        score="sigmoid",
        has_correction_bias=True,
        ranks_by_logits=True,
        shared_intermediate_size=keys.integer(_SHARED, MAX_WIDTH),
    )
    has_windows = read_window(keys) is not None
    layers = alternating_layers(keys, _PERIOD if has_windows else 1)
    layers = tuple(replace(layer, use_rope=not has_windows or layer.sliding_window is not None) for layer in layers)
    config = build(keys, layers=all_with_experts(layers, experts), computed=(*COUNT_KEYS, _SHARED))
    return replace(config, qk_norm="heads", norm_placement="sandwich")


FAMILY = Family(
    ("Kolibri1ForCausalLM",),
    decoder_config,
    renames={
        "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "post_attn_norm": "post_attention_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
)
