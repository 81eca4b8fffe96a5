"""LFM2 with experts, as LFM2-8B-A1B (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.routing import GATING, SIGMOID
from jaxserve.checkpoint.gguf.short_conv import FINAL_NORM, TENSOR_NAMES
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import lfm2
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._lfm2_vl import lfm2_vl
from jaxserve.models.families.lfm2 import build_lfm2, lfm2_layers, read_keys

_SCALE: Final = "expert_weights_scale"
_NORMALIZED: Final = "expert_weights_norm"
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


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return short convolutions and the router's keys. llama.cpp normalises the weights of experts and does not scale them."""
    if (keys.get(GATING) or SIGMOID) != SIGMOID:
        keys.fail(GATING, f"{SIGMOID} (sigmoid) or none", keys.get(GATING))
    if keys.get(_SCALE) not in (None, 1.0):
        keys.fail(_SCALE, "1 or none", keys.get(_SCALE))
    if keys.get(_NORMALIZED) is False:
        keys.fail(_NORMALIZED, "true or none", False)
    return {
        **lfm2.gguf_config(keys, config),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_dense_layers": keys.integer(
            "leading_dense_block_count", 0, minimum=0, maximum=config["num_hidden_layers"]
        ),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors),
    }


FAMILY = Family(
    ("Lfm2MoeForCausalLM",),
    decoder_config,
    text_part_of=(lfm2.VISION_MODEL,),
    read_vision=lfm2_vl,
    text_model_types=("lfm2_moe",),
    renames={**lfm2.RENAMES, "expert_bias": "gate.e_score_correction_bias"},
    gguf=GGUFArchitecture(
        "lfm2moe",
        has_mixers=True,
        tensor_names=TENSOR_NAMES,
        top_names=FINAL_NORM,
        experts="required",
        config=_gguf_config,
    ),
)
