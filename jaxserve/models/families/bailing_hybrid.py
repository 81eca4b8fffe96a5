"""Ling 3.0: Kimi delta attention whose decays are bounded, and latent attention with gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import KimiDeltaConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, num_layers
from jaxserve.models.families._experts import dense_or_sparse, read_routed_experts
from jaxserve.models.families._hybrid import MAX_TAPS, hybrid_layers, layer_names
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder
from jaxserve.models.families.kimi_linear import OLD_NAMES

DEFAULTS = dict(
    {**_latent.DEFAULTS, **_latent.EXPERT_DEFAULTS},
    num_key_value_heads=32,
    moe_intermediate_size=768,
    num_local_experts=512,
    first_k_dense_replace=2,
)
del DEFAULTS["q_lora_rank"]
_SIZES: Final[Mapping[str, Any]] = {
    "rope_theta": 6_000_000.0,
    "q_lora_rank": None,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "layer_group_size": 6,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "max_position_embeddings": 1 << 18,
    "rope_interleave": True,
}
"""transformers' defaults of further keys."""
_COMPUTED: Final[Mapping[str, tuple[object, ...]]] = {
    "gated_attention_proj_granularity_type": ("head_wise", None),
    "linear_attention": ("kda", None),
    "linear_silu": (True, None),
    "moe_router_enable_expert_bias": (True, None),
    "no_kda_lora": (True, None),
    "num_kv_heads_for_linear_attn": (0, None),
    "pregate_inference": (False, None),
    "rope_interleave": (True, None),
    "scale_router_input": (False, None),
    "score_function": ("sigmoid", None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "up_proj_norm": (False, None),
    "use_bias": (False, None),
    "use_kda_lora": (False, None),
    "use_mla_nope": (False, None),
    "use_nGPT": (False, None),
    "use_qk_norm": (True, None),
    "use_qkv_bias": (False, None),
    "value_norm": (False, None),
}
"""Values that are computed, of keys of published configs."""
_LIMIT_LISTS: Final = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_FACTOR: Final = "partial_rotary_factor"
"""Key of published configs that says what `qk_rope_head_dim` says, too."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Kimi delta attention, and latent attention in the last layer of every group, with DeepSeek-V3's experts after the first layers."""
    keys = _with_names(hf)
    for key, accepted in _COMPUTED.items():
        keys.require(key, *accepted)
    keys.require("hidden_act", "silu")
    keys.require("moe_layer_freq", 1, None)
    delta = KimiDeltaConfig(
        num_heads=keys.integer("linear_num_heads", MAX_HEADS),
        head_dim=keys.integer("linear_head_dim", MAX_HEAD_DIM),
        num_taps=keys.integer("linear_conv_kernel_dim", MAX_TAPS, low=2),
        is_low_rank=False,
        decay_bound=_decay_bound(keys),
    )
    layers = hybrid_layers(keys, _kinds(keys), "linear_attention", delta)
    experts = read_routed_experts(keys, "num_local_experts", "n_shared_experts")
    keys.require("moe_shared_expert_intermediate_size", experts.shared_intermediate_size, None)
    config = latent_decoder(keys, _limited(keys, dense_or_sparse(keys, layers, experts)))
    width = config.layers[0].latent_dim
    layers = tuple(replace(each, latent_dim=width if each.has_kv else None) for each in config.layers)
    return replace(config, layers=layers, output_gate="heads")


def _with_names(hf: Mapping[str, Any]) -> Keys:
    """Return the keys by transformers' names, with the sizes of the delta nets."""
    found = {OLD_NAMES.get(key, key): value for key, value in hf.items() if key != _FACTOR}
    rope = found.get("rope_parameters")
    if isinstance(rope, dict):
        found["rope_parameters"] = {key: value for key, value in rope.items() if key != _FACTOR}
    table = {**DEFAULTS, **_SIZES, **found}
    sizes = {
        "linear_num_heads": table.get("num_attention_heads"),
        "linear_head_dim": table["head_dim"],
        "linear_conv_kernel_dim": table["short_conv_kernel_size"],
    }
    return Keys({**sizes, **table})


def _decay_bound(keys: Keys) -> float | None:
    if not keys.flag("kda_safe_gate"):
        return None
    bound = keys.get("kda_lower_bound")
    if type(bound) not in (int, float) or not -100 <= bound < 0:
        raise keys.error("kda_lower_bound", "a number from -100 to below 0")
    return float(bound)


def _kinds(keys: Keys) -> list[str]:
    """Return the kinds of all layers: by `layer_types`, else by groups of `layer_group_size`."""
    count, size = num_layers(keys), keys.integer("layer_group_size", MAX_LAYERS)
    if keys.get("layer_types") is None and count % size:
        raise keys.error("layer_group_size", f"a divisor of the {count} layers")
    return layer_names(keys, ["linear_attention" if (index + 1) % size else "full_attention" for index in range(count)])


def _limited(keys: Keys, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Return layers whose experts have the limits that lists with a number for each layer give them; 0 and null are none."""
    routed, shared = (_limits(keys, name, len(layers)) for name in _LIMIT_LISTS)
    return tuple(
        layer
        if layer.experts is None
        else replace(layer, experts=replace(layer.experts, limit=one, shared_limit=other))
        for layer, one, other in zip(layers, routed, shared, strict=True)
    )


def _limits(keys: Keys, key: str, count: int) -> list[float | None]:
    found = keys.get(key) or []
    if not isinstance(found, list) or any(each is not None and type(each) not in (int, float) for each in found):
        raise keys.error(key, "a list of numbers")
    if any(each is not None and not 0 <= each < 1e6 for each in found):
        raise keys.error(key, "numbers from 0 to 1000000")
    given = [float(each) if each else None for each in found[:count]]
    return given + [None] * (count - len(given))


def _mtp_keys(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the layer after the last one, which has latent attention and experts. Raises CheckpointError for another mixer."""
    keys = _with_names(hf)
    keys.require("mtp_use_kda", False, None)
    lists = {name: keys.get(name) for name in _LIMIT_LISTS}
    limits = {name: found[num_layers(keys) :] for name, found in lists.items() if isinstance(found, list)}
    return {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], **limits}


def _names(hf: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our names of the parts of mixers, which differ by the kind of the layer."""
    renames: dict[str, str] = {}
    for index, kind in enumerate(_kinds(_with_names(hf))):
        is_delta = kind == "linear_attention"
        ours = f"layers.{index}.{'linear_attn' if is_delta else 'self_attn'}"
        parts = {"o_norm": "norm", "forget_gate": ""} if is_delta else {"g_proj": "gate_proj", "dense": "o_proj"}
        for stored in (f"layers.{index}.attention", f"layers.{index}.self_attn"):
            renames |= {f"{stored}.{own}": f"{ours}.{new}".removesuffix(".") for own, new in parts.items()}
            if stored != ours:
                renames[stored] = ours
    return renames


FAMILY = Family(
    ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
    decoder_config,
    renames={"word_embeddings": "embed_tokens", "expert_bias": "e_score_correction_bias"},
    config_renames=_names,
    mtp="layer",
    mtp_keys=_mtp_keys,
)
