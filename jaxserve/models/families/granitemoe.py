"""Granite 3 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import MAX_WIDTH, build, full_layers
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.granite import DEFAULTS as GRANITE_DEFAULTS
from jaxserve.models.families.granite import FACTORS, gguf_config, with_factors
from jaxserve.models.families.granitemoehybrid import RENAMES

DEFAULTS = dict(
    {key: value for key, value in GRANITE_DEFAULTS.items() if key != "mlp_bias"},
    num_local_experts=8,
    num_experts_per_tok=2,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Granite with experts in every layer."""
    keys = Keys({**DEFAULTS, "max_position_embeddings": 2048, **hf})
    return granite_moe(keys, full_layers(keys), shared_width=None)


def granite_moe(keys: Keys, layers: tuple[LayerConfig, ...], *, shared_width: str | None) -> DecoderConfig:
    """Build Granite with experts in all of `layers`. shared_width: the key for the width of the expert that every token uses, 0 for none."""
    experts = read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=True)
    width = 0 if shared_width is None else keys.integer(shared_width, MAX_WIDTH, low=0)
    layers = all_with_experts(layers, replace(experts, shared_intermediate_size=width or None))
    return with_factors(keys, build(keys, layers=layers, computed=(*COUNT_KEYS, *FACTORS)))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Granite's factors; a file with a shared expert is read as GraniteMoeShared."""
    found, width = gguf_config(keys, config), "expert_shared_feed_forward_length"
    if keys.get(width) in (None, 0):
        return found
    return found | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": keys.integer(width),
    }


FAMILY = Family(
    ("GraniteMoeForCausalLM",),
    decoder_config,
    renames=RENAMES,
    stacked_experts="halves",
    gguf=GGUFArchitecture(
        "granitemoe", is_rope_permuted=True, has_bias_flags=True, experts="required", config=_gguf_config
    ),
)
