"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.latent import TENSOR_NAMES, latent_config
from jaxserve.checkpoint.gguf.routing import GATING, SIGMOID, SOFTMAX, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import full_layers
from jaxserve.models.families._experts import dense_first, read_groups
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder, read_deepseek_experts

DEFAULTS = dict(
    _latent.DEFAULTS,
    mlp_bias=False,
    moe_intermediate_size=1407,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=None,
    routed_scaling_factor=1.0,
    n_group=None,
    topk_group=None,
    topk_method="greedy",
    norm_topk_prob=False,
    first_k_dense_replace=0,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Latent attention, and softmax-routed experts after the first dense layers; groups are ranked by their best expert."""
    keys = Keys({**DEFAULTS, "rope_interleave": True, **hf})
    keys.require("norm_topk_prob", False)
    keys.require("scoring_func", "softmax", None)
    experts = read_deepseek_experts(keys, _with_router, is_normalized=False)
    return latent_decoder(keys, dense_first(keys, full_layers(keys), experts))


def _with_router(keys: Keys, experts: ExpertsConfig) -> ExpertsConfig:
    keys.require("topk_method", "greedy", "group_limited_greedy")
    experts = replace(experts, weight_scale=keys.number("routed_scaling_factor"))
    if keys.get("topk_method") == "greedy":
        return experts
    return replace(read_groups(keys, experts), group_score="best")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of latent attention and of the router; a file with a sigmoid router is read as DeepSeek-V3, one without
    experts as Youtu."""
    temperature = "attention.temperature_scale"
    if keys.get(temperature):
        keys.fail(temperature, "none: queries do not grow with their position", keys.get(temperature))
    found = {**no_window(keys, config), **latent_config(keys, config)}
    if "num_experts" not in config:
        return found | {"architectures": ["YoutuForCausalLM"]}
    found |= router_config(keys, config)
    if _has_sigmoid(keys):
        return found | {"architectures": ["DeepseekV3ForCausalLM"]}
    if found["norm_topk_prob"]:
        keys.fail("expert_weights_norm", "false beside softmax scores", True)
    return found | {"topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy"}


def _has_sigmoid(keys: GGUFKeys) -> bool:
    """Return True if the router's scores are sigmoids: files older than the key have the router's bias then."""
    has_bias = any(".exp_probs_b." in name for name in keys.file.tensors)
    gating = keys.get(GATING) or (SIGMOID if has_bias else SOFTMAX)
    known = (SIGMOID,) if has_bias else (SOFTMAX, SIGMOID)
    if gating not in known:
        keys.fail(GATING, f"{' or '.join(map(str, known))}, or none", gating)
    return gating == SIGMOID


FAMILY = Family(
    ("DeepseekV2ForCausalLM",),
    decoder_config,
    gguf=GGUFArchitecture(
        "deepseek2",
        has_latent_attention=True,
        tensor_names=TENSOR_NAMES,
        experts="optional",
        config=_gguf_config,
    ),
)
