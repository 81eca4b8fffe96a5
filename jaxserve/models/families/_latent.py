"""Keys of families with multi-head latent attention, and DeepSeek's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.latent import LatentConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_HEAD_DIM, MAX_WIDTH, build
from jaxserve.models.families._experts import COUNT_KEYS, read_experts, with_shared
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import mscale_all_dim

DEFAULTS: Final[Mapping[str, Any]] = {
    **COMMON_DEFAULTS,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
EXPERT_DEFAULTS: Final[Mapping[str, Any]] = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
"""transformers' defaults of experts in DeepSeek-V3 and families that follow it."""
_COMPUTED = (*COUNT_KEYS, "n_shared_experts")
_INDEXER = ("index_topk", "index_n_heads")
"""Keys of sparse attention (DeepSeek-V3.2)."""


def latent_decoder(keys: Keys, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    """Build a decoder with multi-head latent attention."""
    latent = _read_latent(keys)
    keys = Keys({**keys.table, "head_dim": latent.rope_dim, "num_key_value_heads": None}, keys.prefix)
    layers = tuple(replace(layer, latent_dim=latent.width) for layer in layers)
    config = build(keys, layers=layers, qkv_bias=False, computed=_COMPUTED)
    return replace(
        config,
        latent=latent,
        attention_out_bias=keys.flag("attention_bias"),
        attention_scale=latent.query_dim**-0.5 * mscale_all_dim(keys) ** 2,
        rotary_pairs="adjacent" if keys.flag("rope_interleave") else "halves",
    )


def read_deepseek_experts(
    keys: Keys, with_router: Callable[[Keys, ExpertsConfig], ExpertsConfig], *, is_normalized: bool
) -> ExpertsConfig:
    """Read experts of which some are shared. with_router: adds what the family's router reads."""
    for key in _INDEXER:
        keys.require(key, None)
    keys.require("moe_layer_freq", 1, None)
    experts = read_experts(keys, "n_routed_experts", "moe_intermediate_size", is_normalized=is_normalized)
    return with_shared(keys, with_router(keys, experts), "n_shared_experts")


def _read_latent(keys: Keys) -> LatentConfig:
    return LatentConfig(
        rank=keys.integer("kv_lora_rank", MAX_WIDTH),
        rope_dim=keys.integer("qk_rope_head_dim", MAX_HEAD_DIM, low=2),
        plain_dim=keys.integer("qk_nope_head_dim", MAX_HEAD_DIM),
        value_dim=keys.integer("v_head_dim", MAX_HEAD_DIM),
        query_rank=None if keys.get("q_lora_rank") is None else keys.integer("q_lora_rank", MAX_WIDTH),
    )
