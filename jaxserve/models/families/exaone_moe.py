"""K-EXAONE: EXAONE 4 with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, dense_layers
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import exaone4
from jaxserve.models.families._common import build
from jaxserve.models.families._experts import COUNT_KEYS, dense_or_sparse, read_routed_experts
from jaxserve.models.families._keys import Keys

DEFAULTS = dict(
    exaone4.DEFAULTS,
    moe_intermediate_size=1024,
    num_experts=64,
    num_experts_per_tok=8,
    num_shared_experts=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """EXAONE 4's attention in blocks with norms before them, and sigmoid-routed and shared experts in most layers."""
    keys = Keys({**DEFAULTS, "sliding_window_pattern": 4, **hf})
    experts = read_routed_experts(keys, "num_experts", "num_shared_experts")
    layers = dense_or_sparse(keys, exaone4.read_layers(keys), experts)
    return replace(build(keys, layers=layers, computed=COUNT_KEYS), qk_norm="heads")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of windows and of the router."""
    check_gating(keys, SIGMOID)
    routing, dense = router_config(keys, config), dense_layers(keys, config)
    return {
        **exaone4.gguf_config(keys, config),
        **routing,
        "n_shared_experts": None,
        "num_shared_experts": routing["n_shared_experts"],
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(config["num_hidden_layers"])],
    }


FAMILY = Family(
    ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    decoder_config,
    renames={"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"},
    gguf=GGUFArchitecture("exaone-moe", experts="required", config=_gguf_config),
)
