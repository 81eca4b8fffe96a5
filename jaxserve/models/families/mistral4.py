"""Mistral Small 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.latent import TENSOR_NAMES, latent_config
from jaxserve.checkpoint.gguf.routing import SOFTMAX, check_gating, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import MAX_HEAD_DIM, full_layers
from jaxserve.models.families._experts import dense_first, read_groups
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder, read_deepseek_experts
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._rope import query_scaling

DEFAULTS = dict(
    _latent.DEFAULTS,
    num_key_value_heads=32,
    kv_lora_rank=256,
    q_lora_rank=1024,
    qk_nope_head_dim=64,
    moe_intermediate_size=2048,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=0,
)
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek's latent attention with queries that grow with their position, and softmax-routed experts in groups."""
    keys = Keys({**DEFAULTS, "rope_interleave": True, "max_position_embeddings": 1_048_576, **hf})
    keys = _with_whole_rope(keys)
    experts = read_deepseek_experts(keys, _with_router, is_normalized=keys.flag("norm_topk_prob"))
    config = latent_decoder(keys, dense_first(keys, full_layers(keys), experts))
    return replace(config, query_scaling=query_scaling(keys))


def _with_router(keys: Keys, experts: ExpertsConfig) -> ExpertsConfig:
    return replace(read_groups(keys, experts), weight_scale=keys.number("routed_scaling_factor"))


def _with_whole_rope(keys: Keys) -> Keys:
    """Return keys whose rope table is that of the rotated part of a head, which `partial_rotary_factor` must name."""
    keys.require("rope_scaling", None)
    table = keys.get("rope_parameters") or _ROPE
    if not isinstance(table, dict):
        raise keys.error("rope_parameters", "a table")
    rotated, plain = (keys.integer(f"qk_{part}_head_dim", MAX_HEAD_DIM) for part in ("rope", "nope"))
    share, own = table.get("partial_rotary_factor"), Keys(table, "rope_parameters.")
    if share is not None and not math.isclose(own.number("partial_rotary_factor"), rotated / (rotated + plain)):
        raise own.error("partial_rotary_factor", f"qk_rope_head_dim over the head ({rotated / (rotated + plain):g})")
    rest = {key: value for key, value in table.items() if key != "partial_rotary_factor"}
    return Keys({**keys.table, "rope_parameters": rest}, keys.prefix)


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of latent attention, the router's keys, and the factor on queries, which files may lack: then it is 1.
    `mscale` is 1, as in llama.cpp."""
    check_gating(keys, SOFTMAX)
    found = {**no_window(keys, config), **latent_config(keys, config), **router_config(keys, config)}
    scaling = found.pop("rope_scaling", config.get("rope_scaling")) or {}
    if scaling.get("rope_type") != "yarn":
        keys.fail("rope.scaling.type", "yarn", keys.get("rope.scaling.type"))
    factor, length = "attention.temperature_scale", "attention.temperature_length"
    original = scaling["original_max_position_embeddings"]
    if keys.get(length) not in (None, original):
        keys.fail(length, f"the original context length {original} or none", keys.get(length))
    beta = keys.number(factor) if keys.get(factor) else 0
    table = {**scaling, "mscale": 1.0, "rope_theta": config["rope_theta"], "llama_4_scaling_beta": beta}
    return found | {"rope_scaling": None, "rope_parameters": table}


FAMILY = Family(
    ("Mistral4ForCausalLM",),
    decoder_config,
    text_part_of=("Mistral3ForConditionalGeneration",),
    read_vision=pixtral,
    text_model_types=("mistral4",),
    stacked_experts="halves",
    gguf=GGUFArchitecture(
        "mistral4",
        has_latent_attention=True,
        tensor_names=TENSOR_NAMES,
        experts="required",
        config=_gguf_config,
    ),
)
