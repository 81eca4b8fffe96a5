"""Hy4 (Hunyuan 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.hyper import HyperConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import full_layers
from jaxserve.models.families._experts import dense_or_sparse, with_clamp, with_sigmoid_router
from jaxserve.models.families._hyper import HYPER_NAMES, MAX_STREAMS
from jaxserve.models.families._indexer import indexer_kinds, with_indexer, without_indexer
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder, read_deepseek_experts

DEFAULTS = dict(
    {key: value for key, value in _latent.DEFAULTS.items() if key != "q_lora_rank"},
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    q_lora_rank=1536,
    qk_nope_head_dim=192,
    v_head_dim=256,
    moe_intermediate_size=768,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    routed_scaling_factor=2.827,
    n_group=1,
    topk_group=1,
    index_topk=2048,
    index_n_heads=16,
    index_head_dim=128,
    hc_mult=4,
    hc_magnitude=2.0,
    hc_eps=1e-6,
    swiglu_limit=10.0,
)
_SCHEDULE: Final = {"index_topk_freq": 4, "index_skip_topk_offset": 2}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Latent attention with sinks and gates to what indexers choose, experts with clamped gates, and hyper-connections."""
    keys = Keys({**DEFAULTS, **_SCHEDULE, **hf})
    keys.require("scoring_func", "sigmoid", None)
    keys.require("hidden_act", "silu")
    dense = without_indexer(keys)
    experts = read_deepseek_experts(dense, with_sigmoid_router, is_normalized=keys.flag("norm_topk_prob"))
    layers = dense_or_sparse(dense, full_layers(dense), with_clamp(keys, experts))
    config = latent_decoder(Keys({**dense.table, "rope_interleave": False}, keys.prefix), layers)
    kinds = indexer_kinds(keys, config.num_layers)
    config = with_indexer(keys, config, has_adjacent_pairs=False, kinds=kinds)
    latent = config.latent
    assert latent is not None and latent.indexer is not None, "a decoder with indexers"
    indexer = replace(latent.indexer, rotates_last=True, norm_eps=config.norm_eps)
    eps = keys.number("hc_eps")
    hyper = HyperConfig(keys.integer("hc_mult", MAX_STREAMS), eps, keys.number("hc_magnitude"), share_eps=eps)
    return replace(config, latent=replace(latent, indexer=indexer), output_gate="apart", sinks="all", hyper=hyper)


FAMILY = Family(
    ("HYV4ForCausalLM",),
    decoder_config,
    renames={
        "hc_pre.hc_": "hc_",
        "hc_attn_layer.hc_": "attn_hc.",
        "hc_mlp_layer.hc_": "ffn_hc.",
        "hc_head.hc_head_": "hc_head.hc_",
        **HYPER_NAMES,
        "learnable_sink_param": "sinks",
        "linear_gate": "gate_proj",
    },
    stacked_experts="halves",
    mtp="hy_v4",
)
