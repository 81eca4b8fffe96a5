"""A.X-K1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
    **_latent.EXPERT_DEFAULTS,
    num_key_value_heads=64,
    n_routed_experts=192,
)
_NORM = "post_mlp_layernorm"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek-V3's layers, of which those with experts normalise the output of the feed-forward block, too."""
    keys = Keys({**DEFAULTS, "rope_interleave": True, **hf})
    keys.require("scoring_func", "sigmoid", None)
    experts = read_deepseek_experts(keys, with_sigmoid_router, is_normalized=keys.flag("norm_topk_prob"))
    if experts.num_groups_per_token < experts.num_groups:
        keys.require("topk_method", "noaux_tc", None)
    if keys.get("q_lora_rank") is None:
        raise keys.error("q_lora_rank", "an integer")
    layers = (
        replace(layer, norm_placement="pre" if layer.experts is None else "sandwich_mlp")
        for layer in dense_or_sparse(keys, full_layers(keys), experts)
    )
    return latent_decoder(keys, tuple(layers))


def _unused(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the norms of dense layers, which published checkpoints have and no implementation reads."""
    layers = enumerate(decoder_config(dict(hf)).layers)
    return tuple(f".layers.{index}.{_NORM}.weight" for index, layer in layers if layer.experts is None)


FAMILY = Family(
    ("AXK1ForCausalLM",),
    decoder_config,
    renames={_NORM: "post_feedforward_layernorm"},
    config_unused=_unused,
    has_optional_corrections=True,
)
