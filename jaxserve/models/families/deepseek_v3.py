"""DeepSeek-V3, V3.1 and R1 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534), K2.5 and K2.6."""

from __future__ import annotations

from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import full_layers
from jaxserve.models.families._experts import dense_first, with_sigmoid_router
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder, read_deepseek_experts
from jaxserve.models.families._moonvit import moonvit

DEFAULTS = dict(
    _latent.DEFAULTS,
    **_latent.EXPERT_DEFAULTS,
    num_key_value_heads=128,
    n_routed_experts=256,
    first_k_dense_replace=3,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Latent attention, and sigmoid-routed experts in groups after the first dense layers."""
    keys = Keys({**DEFAULTS, "rope_interleave": True, **hf})
    keys.require("scoring_func", "sigmoid", None)
    keys.require("topk_method", "noaux_tc", None)
    experts = read_deepseek_experts(keys, with_sigmoid_router, is_normalized=keys.flag("norm_topk_prob"))
    return latent_decoder(keys, dense_first(keys, full_layers(keys), experts))


FAMILY = Family(
    ("DeepseekV3ForCausalLM",),
    decoder_config,
    text_part_of=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    text_model_types=("deepseek_v3", "kimi_k2", None),
    read_vision=moonvit,
    renames={"blocks": "layers"},
    mtp="layer",
)
