"""A.X-K2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import deepseek_v32
from jaxserve.models.families._common import MAX_WIDTH
from jaxserve.models.families._indexer import with_indexer
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    {key: value for key, value in deepseek_v32.DEFAULTS.items() if key not in ("first_k_dense_replace", "mlp_bias")},
    num_key_value_heads=32,
    moe_intermediate_size=512,
    n_routed_experts=128,
    kv_lora_rank=128,
    q_lora_rank=384,
    qk_rope_head_dim=32,
    v_head_dim=64,
    qk_nope_head_dim=64,
    n_group=None,
    topk_group=None,
    index_n_heads=16,
    gated_norm_rank=16,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek-V3.2 with gates on norms and on the outputs of attention, and without groups of experts."""
    keys = Keys({**DEFAULTS, "first_k_dense_replace": 1, "rope_interleave": True, **hf})
    keys.require("indexer_rope_interleave", False, None)
    for key in ("n_group", "topk_group"):  # of several groups, experts outside have rank 0 there and not the last one
        keys.require(key, None, 1)
    config = deepseek_v32.dense_attention(Keys({**keys.table, "n_group": 1, "topk_group": 1}, keys.prefix))
    config = with_indexer(keys, config, has_adjacent_pairs=False)
    assert config.latent is not None, "a decoder with latent attention"
    rank = keys.integer("gated_norm_rank", MAX_WIDTH)
    return replace(config, latent=replace(config.latent, has_gate=True), norm_gate_rank=rank)


FAMILY = Family(("AXK2ForCausalLM",), decoder_config, renames={"W_down": "gate_down", "W_up": "gate_up"})
