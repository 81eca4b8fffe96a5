"""GLM-4.7-Flash."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import full_layers
from jaxserve.models.families._experts import dense_or_sparse, with_sigmoid_router
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder, read_deepseek_experts

DEFAULTS = dict(
    _latent.DEFAULTS,
    num_key_value_heads=20,
    rms_norm_eps=1e-5,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    moe_intermediate_size=1536,
    n_routed_experts=64,
    n_shared_experts=1,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    routed_scaling_factor=1.8,
    n_group=1,
    topk_group=1,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Latent attention, and sigmoid-routed experts in the layers that `mlp_layer_types` calls sparse: all but the first."""
    keys = Keys({**DEFAULTS, "rope_interleave": True, **hf})
    keys.require("scoring_func", "sigmoid", None)
    keys.require("topk_method", "noaux_tc", None)
    keys.require("partial_rotary_factor", 1.0, None)
    experts = read_deepseek_experts(keys, with_sigmoid_router, is_normalized=keys.flag("norm_topk_prob"))
    return latent_decoder(keys, dense_or_sparse(keys, full_layers(keys), experts))


FAMILY = Family(("Glm4MoeLiteForCausalLM",), decoder_config, mtp="layer")
