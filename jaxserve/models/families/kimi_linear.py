"""Kimi Linear (arXiv 2510.26692): Kimi delta attention, and latent attention without positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.latent import TENSOR_NAMES, latent_config
from jaxserve.checkpoint.gguf.mixers import mixed_layers
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import KimiDeltaConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, num_layers
from jaxserve.models.families._experts import PART_NAMES, dense_or_sparse, read_routed_experts
from jaxserve.models.families._hybrid import MAX_TAPS, hybrid_layers, layer_names
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder

DEFAULTS = dict(
    _latent.DEFAULTS,
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    q_lora_rank=None,
    moe_intermediate_size=1024,
    num_local_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    n_group=1,
    topk_group=1,
    linear_conv_kernel_dim=4,
    linear_num_heads=32,
    linear_head_dim=128,
)
OLD_NAMES: Final[Mapping[str, str]] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names of transformers, by those of published configs."""
_LINEAR_NAMES: Final[Mapping[str, str]] = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_NO_ROPE: Final[Mapping[str, Any]] = {"rope_theta": 10_000.0, "rope_scaling": None, "rope_parameters": None}
"""Published configs have keys of a rotation that no layer has."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Kimi delta attention, and latent attention in some layers, with DeepSeek-V3's experts after the first dense layers."""
    keys = _with_names(hf)
    keys.require("mla_use_nope", True, None)
    keys.require("moe_router_activation_func", "sigmoid", None)
    keys.require("hidden_act", "silu")
    keys.require("moe_layer_freq", 1, None)
    delta = KimiDeltaConfig(
        num_heads=keys.integer("linear_num_heads", MAX_HEADS),
        head_dim=keys.integer("linear_head_dim", MAX_HEAD_DIM),
        num_taps=keys.integer("linear_conv_kernel_dim", MAX_TAPS, low=2),
    )
    layers = hybrid_layers(keys, _kinds(keys), "linear_attention", delta)
    experts = read_routed_experts(keys, "num_local_experts", "n_shared_experts")
    config = latent_decoder(keys, dense_or_sparse(keys, layers, experts))
    width = config.layers[0].latent_dim
    plain = (replace(each, use_rope=False, latent_dim=width if each.has_kv else None) for each in config.layers)
    return replace(config, layers=tuple(plain))


def _with_names(hf: Mapping[str, Any]) -> Keys:
    """Return the keys by transformers' names."""
    found = {OLD_NAMES.get(key, key): value for key, value in hf.items()}
    linear = hf.get("linear_attn_config")
    table = linear if isinstance(linear, dict) else {}
    found |= {_LINEAR_NAMES[key]: value for key, value in table.items() if key in _LINEAR_NAMES}
    sizes = {"max_position_embeddings": 1 << 20, "rope_interleave": False}
    return Keys({**DEFAULTS, **sizes, **found, **_NO_ROPE})


def _kinds(keys: Keys) -> list[str]:
    """Return the kinds of all layers: by `layer_types`, else by the lists of `linear_attn_config`, which count from 1."""
    count = num_layers(keys)
    default = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    linear = keys.get("linear_attn_config")
    if keys.get("layer_types") is not None or not isinstance(linear, dict) or "full_attn_layers" not in linear:
        return layer_names(keys, default)
    named = Keys(linear, "linear_attn_config.")
    full, delta = named.get("full_attn_layers"), named.get("kda_layers")
    if not isinstance(full, list) or not isinstance(delta, list) or sorted([*full, *delta]) != [*range(1, count + 1)]:
        raise named.error("full_attn_layers", f"with kda_layers, each of the layers 1 to {count} once")
    return ["full_attention" if index + 1 in full else "linear_attention" for index in range(count)]


def _delta_names(hf: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our name of the mixers of layers with Kimi delta attention, which checkpoints name like attention."""
    kinds = enumerate(_kinds(_with_names(hf)))
    return {
        f"layers.{index}.self_attn": f"layers.{index}.linear_attn"
        for index, kind in kinds
        if kind == "linear_attention"
    }


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both kinds of attention and of the router. llama.cpp lets the weights of experts sum to 1."""
    check_gating(keys, SIGMOID)
    return {
        **no_window(keys, config),
        **latent_config(keys, config),
        **router_config(keys, config),
        "norm_topk_prob": True,
        "layer_types": mixed_layers(keys, config, "linear_attention"),
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": keys.integer("kda.head_dim"),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", minimum=2),
    }


_GGUF_NAMES: Final = {
    **TENSOR_NAMES,
    "ssm_conv1d_q": "linear_attn.q_conv1d",
    "ssm_conv1d_k": "linear_attn.k_conv1d",
    "ssm_conv1d_v": "linear_attn.v_conv1d",
    "ssm_f_a": "linear_attn.f_a_proj",
    "ssm_f_b": "linear_attn.f_b_proj",
    "ssm_g_a": "linear_attn.g_a_proj",
    "ssm_g_b": "linear_attn.g_b_proj",
    "ssm_beta": "linear_attn.b_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt",
    "ssm_norm": "linear_attn.norm",
}
FAMILY = Family(
    ("KimiLinearForCausalLM",),
    decoder_config,
    renames={
        "self_attn.o_norm": "self_attn.norm",
        "self_attn.forget_gate": "self_attn",
        "block_sparse_moe": "mlp",
        **PART_NAMES,
    },
    config_renames=_delta_names,
    gguf=GGUFArchitecture(
        "kimi-linear",
        has_mixers=True,
        has_latent_attention=True,
        tensor_names=_GGUF_NAMES,
        renames=_delta_names,
        experts="required",
        config=_gguf_config,
    ),
)
