"""Granite 4: Mamba-2 mixers and attention without positions, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.mamba import TENSOR_NAMES, mamba_config
from jaxserve.checkpoint.gguf.mixers import mixed_layers
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import MAX_WIDTH, build, num_layers
from jaxserve.models.families._experts import COUNT_KEYS, all_with_experts, read_experts
from jaxserve.models.families._hybrid import MAMBA_DEFAULTS, hybrid_layers, layer_names, mamba_width, read_mamba
from jaxserve.models.families._keys import Keys
from jaxserve.models.families.granite import DEFAULTS as GRANITE_DEFAULTS
from jaxserve.models.families.granite import FACTOR_KEYS, FACTORS, gguf_factors, with_factors

DEFAULTS = dict(
    {key: value for key, value in GRANITE_DEFAULTS.items() if key != "mlp_bias"},
    num_local_experts=8,
    num_experts_per_tok=2,
    shared_intermediate_size=1024,
    **MAMBA_DEFAULTS,
)
RENAMES = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.experts": "mlp.experts",
    "block_sparse_moe.router.layer": "mlp.gate",
    "input_linear": "gate_up_proj",
    "output_linear": "down_proj",
}
"""Names of experts and of feed-forward blocks in all Granite models with experts."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Granite with Mamba-2 mixers in most layers, perhaps experts, and a feed-forward block that every token uses."""
    keys = Keys({**DEFAULTS, "max_position_embeddings": 2048, **hf})
    keys.require("position_embedding_type", None, "nope", "rope")
    keys.require("normalization_function", "rmsnorm")
    width = keys.integer("shared_intermediate_size", MAX_WIDTH)
    layers = _layers(keys)
    if _has_experts(keys.table):
        experts = read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=True)
        layers = all_with_experts(layers, replace(experts, shared_intermediate_size=width))
    else:
        keys = Keys({**keys.table, "intermediate_size": width})
    return with_factors(keys, build(keys, layers=layers, computed=(*COUNT_KEYS, *FACTORS)))


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    default = ["linear_attention"] * num_layers(keys)
    mamba = read_mamba(keys, mamba_width(keys), norm="gate_first")
    layers = hybrid_layers(keys, layer_names(keys, default), "linear_attention", mamba)
    has_rope = keys.get("position_embedding_type") == "rope"
    return layers if has_rope else tuple(replace(layer, use_rope=False) for layer in layers)


def _has_experts(hf: Mapping[str, Any]) -> bool:
    return hf.get("num_local_experts") not in (0, None)


def _renames(hf: Mapping[str, Any]) -> dict[str, str]:
    shared = "mlp.shared_experts" if _has_experts({**DEFAULTS, **hf}) else "mlp"
    return {**RENAMES, "shared_mlp": shared}


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return factors, mixers, and the width of the block that every token uses; `rope.scaling.finetuned` false is no rope.
    A file with rope and without factors is read as Bamba."""
    num_experts = config.get("num_experts", 0)
    shared = "expert_shared_feed_forward_length" if num_experts else "feed_forward_length"
    width, hidden_size = keys.integer("ssm.inner_size"), config["hidden_size"]
    if width % hidden_size:
        keys.fail("ssm.inner_size", f"a multiple of embedding_length {hidden_size}", width)
    names = mixed_layers(keys, config, "linear_attention")
    found = {
        **no_window(keys, config),
        **mamba_config(keys),
        "mamba_expand": width // hidden_size,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in keys.file.tensors),
    }
    if keys.get("rope.scaling.finetuned") and not any(keys.has(key) for key in FACTOR_KEYS.values()):
        attending = [index for index, name in enumerate(names) if name == "full_attention"]
        own = {"architectures": ["BambaForCausalLM"], "attn_layer_indices": attending}
        return found | own | {"mlp_bias": any(name.endswith(".ffn_down.bias") for name in keys.file.tensors)}
    return {
        **found,
        **gguf_factors(keys, config),
        "layer_types": names,
        "num_local_experts": num_experts,
        "shared_intermediate_size": keys.integer(shared),
        "position_embedding_type": "nope" if keys.get("rope.scaling.finetuned") is False else "rope",
    }


FAMILY = Family(
    ("GraniteMoeHybridForCausalLM",),
    decoder_config,
    config_renames=_renames,
    stacked_experts="halves",
    gguf=GGUFArchitecture(
        "granitehybrid",
        is_rope_permuted=True,
        has_partial_rotary=True,
        has_mixers=True,
        tensor_names=TENSOR_NAMES,
        experts="optional",
        config=_gguf_config,
    ),
)
