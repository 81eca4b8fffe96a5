"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: layers of one block each, a Mamba-2 mixer, attention or feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.mamba import TENSOR_NAMES, mamba_config
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.recurrent import Mamba2Config
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, build
from jaxserve.models.families._experts import COUNT_KEYS, read_experts, with_sigmoid_router
from jaxserve.models.families._hybrid import OLD_NAMES, read_mamba
from jaxserve.models.families._keys import Keys

DEFAULTS: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "mamba_proj_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
_SIZES: Final[Mapping[str, Any]] = {"max_position_embeddings": 4096, "intermediate_size": 21504}
"""Defaults of further keys."""
_LAYERS: Final = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""Keys for the kinds of layers, the newest first; the last is a text with a letter for each layer."""
_LETTERS: Final = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_BLOCKS: Final = {"linear_attention": "mamba", "full_attention": "self_attn", "mlp": "mlp", "moe": "mlp"}
"""Our name of the only block of a layer, by the layer's kind."""
_NORMS: Final = {"mamba": "input_layernorm", "self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
_MAMBA_KEYS: Final = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}
"""Keys of mixers, and those of other families with Mamba-2."""
_COMPUTED: Final = (*COUNT_KEYS, "n_shared_experts")


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Layers of one block, no positions, and feed-forward blocks and experts without gates.

    Steps are bounded by `time_step_limit`, in prompts and in generation; transformers bounds those of prompts by
    `time_step_min` instead.
    """
    keys = Keys({**DEFAULTS, **_SIZES, **hf})
    keys.require("attention_bias", False)
    keys.require("mamba_hidden_act", "silu")
    keys.require("sliding_window", None)
    names = _names(keys)
    plain = LayerConfig(use_rope=False)
    kinds = {
        "linear_attention": replace(plain, has_kv=False, has_mlp=False, recurrent=_mamba(keys)),
        "full_attention": replace(plain, has_mlp=False),
        "mlp": replace(plain, has_kv=False),
        "moe": replace(plain, has_kv=False, experts=_experts(keys) if "moe" in names else None),
    }
    config = build(
        keys,
        layers=tuple(kinds[name] for name in names),
        qkv_bias=False,
        computed=_COMPUTED,
        activation_key="mlp_hidden_act",
        eps_key="layer_norm_epsilon",
    )
    return replace(config, norm_weights="wide", mlp_has_gate=False)


def _given(keys: Keys) -> str:
    return next((key for key in _LAYERS if keys.get(key) is not None), _LAYERS[0])


def _names(keys: Keys) -> list[str]:
    """Return the kind of each layer."""
    key = _given(keys)
    found = keys.get(key)
    if found is None:
        return ["linear_attention", "moe", "full_attention", "mlp"]
    is_text = key == _LAYERS[-1]
    names = [_LETTERS.get(letter, "") for letter in str(found)] if is_text else found
    if not isinstance(names, list) or not 0 < len(names) <= MAX_LAYERS:
        raise keys.error(key, f"a list of at most {MAX_LAYERS} layers")
    names = [OLD_NAMES.get(str(name), str(name)) for name in names]
    if any(name not in _BLOCKS for name in names):
        raise keys.error(key, "letters of " + " ".join(_LETTERS) if is_text else " and ".join(_BLOCKS) + " only")
    return names


def _mamba(keys: Keys) -> Mamba2Config:
    names = {ours: own for own, ours in _MAMBA_KEYS.items()}
    own = Keys({**keys.table, **{ours: keys.get(name) for ours, name in names.items()}}, names=names)
    width = own.integer("mamba_n_heads", MAX_HEADS) * own.integer("mamba_d_head", MAX_HEAD_DIM)
    return read_mamba(own, width, norm="gate_first")


def _experts(keys: Keys) -> ExpertsConfig:
    keys.require("n_shared_experts", 1)
    is_normalized = keys.flag("norm_topk_prob")
    experts = read_experts(keys, "n_routed_experts", "moe_intermediate_size", is_normalized=is_normalized)
    inner = "moe_latent_size"
    return replace(
        with_sigmoid_router(keys, experts),
        shared_intermediate_size=keys.integer("moe_shared_expert_intermediate_size", MAX_WIDTH),
        latent_size=None if keys.get(inner) is None else keys.integer(inner, MAX_WIDTH),
    )


def _renames(hf: Mapping[str, Any]) -> Mapping[str, str]:
    """Name a layer's only block, and the norm before it, as in other decoders."""
    renames = {"backbone": "model", "embeddings": "embed_tokens", "norm_f": "norm"}
    for index, name in enumerate(_names(Keys(hf))):
        block = _BLOCKS[name]
        renames[f"layers.{index}.mixer"] = f"layers.{index}.{block}"
        renames[f"layers.{index}.norm"] = f"layers.{index}.{_NORMS[block]}"
    return renames


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kind of each layer, mixers, and the router's keys. llama.cpp scores experts by a sigmoid, and forms no groups.

    Files have a rotary dimension though no layer has positions.
    """
    names, mamba = keys.file.tensors, mamba_config(keys)
    found = {
        **no_window(keys, config),
        "layers_block_type": [_stored_block(keys, index) for index in range(config["num_hidden_layers"])],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "partial_rotary_factor": 1.0,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in names),
        **{name: mamba[stored] for name, stored in _MAMBA_KEYS.items()},
    }
    if "num_experts" not in config:
        return found
    if keys.get("expert_group_count") not in (None, 0, 1):
        keys.fail("expert_group_count", "1 or none", keys.get("expert_group_count"))
    latent = {"moe_latent_size": keys.integer("moe_latent_size")} if keys.has("moe_latent_size") else {}
    return (
        found
        | latent
        | {
            "n_routed_experts": config["num_experts"],
            "n_shared_experts": keys.integer("expert_shared_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
            "norm_topk_prob": keys.flag("expert_weights_norm"),
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        }
    )


def _stored_block(keys: GGUFKeys, index: int) -> str:
    """Return the kind of a layer, by the tensors that it has in the file."""
    parts = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    return next((kind for part, kind in parts.items() if f"blk.{index}.{part}.weight" in keys.file.tensors), "mlp")


FAMILY = Family(
    ("NemotronHForCausalLM",),
    decoder_config,
    config_renames=_renames,
    gguf=GGUFArchitecture(
        "nemotron_h",
        other_names=("nemotron_h_moe",),
        is_rope_permuted=True,
        has_partial_rotary=True,
        has_mixers=True,
        tensor_names={**TENSOR_NAMES, "attn_norm": "norm"},
        renames=_renames,
        experts="optional",
        config=_gguf_config,
    ),
)
