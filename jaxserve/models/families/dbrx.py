"""DBRX (Databricks)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import CLIP, GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.routing import SOFTMAX, fixed_router
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import build, full_layers, read_activation
from jaxserve.models.families._experts import all_with_experts, read_experts
from jaxserve.models.families._keys import Keys

KEY_NAMES: Final = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
DEFAULTS: Final = {"rope_theta": 10_000.0, "tie_word_embeddings": False}
_ATTENTION: Final = {"kv_n_heads": 1, "clip_qkv": None}
_EXPERTS: Final = {
    "ffn_act_fn": None,
    "ffn_hidden_size": 3584,
    "moe_num_experts": 4,
    "moe_top_k": 1,
    "moe_normalize_expert_weights": 1.0,
}
_NORM_EPS: Final = "layer_norm_eps"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm without biases, clipped queries, keys and values, and experts in every layer."""
    keys = Keys({**DEFAULTS, **with_our_keys(hf, KEY_NAMES)}, names={ours: own for own, ours in KEY_NAMES.items()})
    keys.require("tie_word_embeddings", False)
    attention, ffn = _part(keys, "attn_config", _ATTENTION), _part(keys, "ffn_config", _EXPERTS)
    ffn.require("moe_normalize_expert_weights", 1.0, None)
    read = Keys(
        {**ffn.table, "num_experts_per_tok": ffn.get("moe_top_k")}, ffn.prefix, {"num_experts_per_tok": "moe_top_k"}
    )
    is_normalized = ffn.get("moe_normalize_expert_weights") is not None
    experts = read_experts(read, "moe_num_experts", "ffn_hidden_size", is_normalized=is_normalized)
    own = {
        "num_key_value_heads": attention.get("kv_n_heads"),
        "intermediate_size": experts.intermediate_size,
        "hidden_act": _activation(ffn),
        _NORM_EPS: 1e-5,
    }
    keys = replace(_with_theta(keys, attention), names={**keys.names, "num_key_value_heads": "attn_config.kv_n_heads"})
    keys = replace(keys, table={**keys.table, **own})
    config = build(keys, layers=all_with_experts(full_layers(keys), experts), eps_key=_NORM_EPS)
    clip = None if attention.get("clip_qkv") is None else attention.number("clip_qkv")
    return replace(config, norm_kind="layer", qkv_clip=clip)


def _part(keys: Keys, name: str, defaults: Mapping[str, Any]) -> Keys:
    table = keys.get(name) or {}
    if not isinstance(table, dict):
        raise keys.error(name, "a table")
    return Keys({**defaults, **table}, f"{name}.")


def _activation(ffn: Keys) -> Any:
    """Return the name of the activation, which has no settings."""
    found = ffn.get("ffn_act_fn") or {"name": "silu"}
    if not isinstance(found, dict) or not {*found} <= {"name"}:
        raise ffn.error("ffn_act_fn", "a table with a name")
    own = Keys({"name": "silu", **found}, f"{ffn.prefix}ffn_act_fn.")
    read_activation(own, "name")
    return own.get("name")


def _with_theta(keys: Keys, attention: Keys) -> Keys:
    """Return keys with the rope base, which is among those of attention in published configs."""
    theta = attention.get("rope_theta")
    if theta is None:
        return keys
    table = keys.get("rope_parameters")
    if isinstance(table, dict):
        Keys(table, "rope_parameters.").require("rope_theta", theta)
    return replace(keys, table={**keys.table, "rope_theta": theta})


def _with_kv_heads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    attention = config.get("attn_config")
    count = attention.get("kv_n_heads", 1) if isinstance(attention, dict) else 1
    return {**config, "num_key_value_heads": count}


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of attention and of experts."""
    fixed_router(keys, SOFTMAX)
    attention = {"kv_n_heads": config["num_key_value_heads"], "rope_theta": config["rope_theta"]}
    experts = {
        "ffn_hidden_size": config["intermediate_size"],
        "moe_num_experts": config["num_experts"],
        "moe_top_k": config["num_experts_per_tok"],
    }
    return {
        **no_window(keys, config),
        "attn_config": {**attention, "clip_qkv": keys.number(CLIP) if keys.get(CLIP) else None},
        "ffn_config": experts,
        "num_experts": None,
    }


FAMILY = Family(
    ("DbrxForCausalLM",),
    decoder_config,
    renames={
        "norm_attn_norm.attn.Wqkv": "self_attn.qkv_proj",
        "norm_attn_norm.attn.out_proj": "self_attn.o_proj",
        "norm_attn_norm.norm_1": "input_layernorm",
        "norm_attn_norm.norm_2": "post_attention_layernorm",
        "ffn.router.layer": "mlp.gate",
        "ffn.experts.mlp.w1": "mlp.experts.gate_proj",
        "ffn.experts.mlp.v1": "mlp.experts.up_proj",
        "ffn.experts.mlp.w2": "mlp.experts.down_proj",
        "transformer": "model",
        "wte": "embed_tokens",
        "blocks": "layers",
        "norm_f": "norm",
    },
    key_names=KEY_NAMES,
    shapes=_with_kv_heads,
    stacked_experts="rows_by_width",
    gguf=GGUFArchitecture(
        "dbrx",
        eps_key=_NORM_EPS,
        tensor_names={"attn_qkv": "self_attn.qkv_proj", "attn_output_norm": "post_attention_layernorm"},
        experts="required",
        config=_gguf_config,
    ),
)
