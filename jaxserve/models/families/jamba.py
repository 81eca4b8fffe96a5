"""Jamba (arXiv 2403.19887): Mamba mixers, attention without positions, and experts in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import KV_HEADS, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.mamba import SCAN_NAMES, scan_config
from jaxserve.checkpoint.gguf.mixers import mixed_layers
from jaxserve.checkpoint.gguf.routing import SOFTMAX, check_gating
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import MambaConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_LAYERS, build, num_layers
from jaxserve.models.families._experts import COUNT_KEYS, MAX_EXPERTS, read_experts
from jaxserve.models.families._hybrid import MAX_STATE, MAX_TAPS, hybrid_layers, mamba_width
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._mamba import step_rank

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=8,
    num_experts_per_tok=2,
    num_experts=16,
    expert_layer_period=2,
    expert_layer_offset=1,
    attn_layer_period=8,
    attn_layer_offset=4,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_dt_rank="auto",
    mamba_conv_bias=True,
    mamba_proj_bias=False,
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Mamba mixers with norms in all layers but one of every `attn_layer_period`."""
    keys = Keys({**DEFAULTS, "max_position_embeddings": 262_144, **hf})
    keys.require("hidden_act", "silu")
    keys.require("sliding_window", None)
    keys.require("mamba_inner_layernorms", True, None)
    count = num_layers(keys)
    attention = _every(keys, "attn_layer_period", "attn_layer_offset")
    names = ["full_attention" if index in attention else "linear_attention" for index in range(count)]
    given = keys.get("layers_block_type")
    if given is not None and given != ["attention" if index in attention else "mamba" for index in range(count)]:
        raise keys.error("layers_block_type", "what attn_layer_period and attn_layer_offset say")
    layers = hybrid_layers(keys, names, "linear_attention", _mixer(keys))
    return build(keys, layers=_with_experts(keys, layers), computed=COUNT_KEYS)


def _every(keys: Keys, period_key: str, offset_key: str) -> range:
    """Return the layers of a kind that comes once in a period."""
    period = keys.integer(period_key, MAX_LAYERS)
    return range(keys.integer(offset_key, period - 1, low=0), num_layers(keys), period)


def _mixer(keys: Keys) -> MambaConfig:
    return MambaConfig(
        num_channels=mamba_width(keys),
        state_dim=keys.integer("mamba_d_state", MAX_STATE),
        step_rank=step_rank(keys, "mamba_dt_rank"),
        num_taps=keys.integer("mamba_d_conv", MAX_TAPS, low=2),
        has_bias=keys.flag("mamba_proj_bias"),
        has_conv_bias=keys.flag("mamba_conv_bias"),
        norm="plain",
    )


def _with_experts(keys: Keys, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Remove positions, and add experts to some layers if there are several."""
    layers = tuple(replace(layer, use_rope=False) for layer in layers)
    if keys.integer("num_experts", MAX_EXPERTS) == 1:
        return layers
    experts = read_experts(keys, "num_experts", "intermediate_size", is_normalized=False)
    sparse = _every(keys, "expert_layer_period", "expert_layer_offset")
    return tuple(replace(layer, experts=experts) if index in sparse else layer for index, layer in enumerate(layers))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of mixers, and periods of attention and of experts by the layers that have them."""
    check_gating(keys, SOFTMAX)
    count, names = config["num_hidden_layers"], keys.file.tensors
    kinds = mixed_layers(keys, config, "linear_attention")
    attention = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    sparse = [index for index in range(count) if f"blk.{index}.ffn_gate_inp.weight" in names]
    return {
        **no_window(keys, config),
        **scan_config(keys, config),
        **_period(keys, KV_HEADS, "attn_layer", attention, count),
        **_period(keys, "expert_count", "expert_layer", sparse, count),
        "num_experts": config.get("num_experts", 1) if sparse else 1,
    }


def _period(keys: GGUFKeys, key: str, kind: str, layers: list[int], count: int) -> dict[str, int]:
    """Return the period and the offset of a kind of layers; raise CheckpointError for layers at other distances."""
    offset = layers[0] if layers else 0
    period = layers[1] - offset if len(layers) > 1 else count
    if layers and (layers != [*range(offset, count, period)] or offset >= period):
        keys.fail(key, "layers at the same distance from each other", layers)
    return {f"{kind}_period": period, f"{kind}_offset": offset}


FAMILY = Family(
    ("JambaForCausalLM",),
    decoder_config,
    renames={
        "feed_forward.router": "mlp.gate",
        "feed_forward": "mlp",
        "pre_ff_layernorm": "post_attention_layernorm",
        "final_layernorm": "norm",
    },
    gguf=GGUFArchitecture("jamba", has_mixers=True, tensor_names=SCAN_NAMES, experts="optional", config=_gguf_config),
)
