"""LFM2 with experts, as LFM2-8B-A1B (arXiv 2511.23404)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import lfm2
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families.lfm2 import build_lfm2, lfm2_layers, read_keys

_DENSE = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs")
DEFAULTS = {key: value for key, value in lfm2.DEFAULTS.items() if key not in _DENSE} | {
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_dense_layers": 2,
    "use_expert_bias": True,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LFM2 with sigmoid-routed experts after the first dense layers."""
    keys = read_keys({**DEFAULTS, "intermediate_size": 7168, **hf})
    experts = read_experts(keys, "num_experts", "moe_intermediate_size", is_normalized=keys.flag("norm_topk_prob"))
    experts = replace(
        experts,
        score="sigmoid",
        has_correction_bias=keys.flag("use_expert_bias"),
        weight_scale=keys.number("routed_scaling_factor"),
    )
    layers = lfm2_layers(keys)
    count = keys.integer("num_dense_layers", len(layers), low=0)
    return build_lfm2(keys, (*layers[:count], *all_with_experts(layers[count:], experts)), *COUNT_KEYS)


FAMILY = Family(
    ("Lfm2MoeForCausalLM",), decoder_config, renames={**lfm2.RENAMES, "expert_bias": "gate.e_score_correction_bias"}
)
