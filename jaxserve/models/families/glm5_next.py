"""GLM-5.3-Flash, the text part: Kimi delta attention, sparse latent attention without positions, and mixed residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.experts import ClampedGate
from jaxserve.model_config.hyper import HyperConfig
from jaxserve.model_config.latent import IndexerConfig
from jaxserve.model_config.recurrent import KimiDeltaConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, num_layers, with_sizes
from jaxserve.models.families._experts import dense_or_sparse, read_routed_experts
from jaxserve.models.families._hybrid import MAX_TAPS, hybrid_layers, layer_names
from jaxserve.models.families._hyper import HYPER_NAMES, MAX_STREAMS
from jaxserve.models.families._indexer import INDEXED, indexer_kinds
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS: Final[Mapping[str, Any]] = dict(
    _latent.DEFAULTS,
    num_key_value_heads=64,
    rms_norm_eps=1e-5,
    qk_rope_head_dim=0,
    qk_nope_head_dim=256,
    v_head_dim=256,
    moe_intermediate_size=2048,
    n_routed_experts=288,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    n_group=1,
    topk_group=1,
    swiglu_limit=10.0,
    index_topk=2048,
    index_n_heads=32,
    index_head_dim=128,
    index_kpool=16,
    linear_conv_kernel_dim=4,
    linear_num_heads=64,
    linear_head_dim=128,
    linear_lower_bound=-5.0,
    hc_mult=4,
    hc_eps=1e-6,
    hc_sinkhorn_iters=20,
)
_FURTHER: Final[Mapping[str, Any]] = {
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "rope_interleave": False,
    "max_position_embeddings": 1 << 20,
}
"""Defaults of keys that transformers reads if they are there."""
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 154_880,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
}
"""transformers' defaults of further keys, which a text part may leave out."""
_NO_ROPE: Final[Mapping[str, Any]] = {"rope_theta": 10_000.0, "rope_scaling": None, "rope_parameters": None}
"""Published configs may have keys of a rotation that no layer has."""
_IMPLIED: Final[Mapping[str, tuple[object, ...]]] = {
    "qk_rope_head_dim": (0,),
    "mla_use_nope": (True, None),
    "index_kpool_compress": (True, None),
    "index_kpool_always_select_tail": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "hidden_act": ("silu",),
}
"""Values that are computed, of keys that published configs may have."""
_LINEAR: Final = "linear_attn_config"
_LINEAR_NAMES: Final[Mapping[str, str]] = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
"""Names of transformers, by those in the table `linear_attn_config` of published configs."""
_BOUND: Final = "linear_lower_bound"
_LEAST_BOUND, _NUM_DENSE = -100, 3
"""The least bound that is read, and the layers without experts if a config does not say."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Kimi delta attention whose decays are bounded, latent attention to pools of tokens in every fourth layer, and DeepSeek-V3's
    experts with clamped gates after the first layers."""
    keys = _keys(with_sizes(_SIZES, hf))
    for name, accepted in _IMPLIED.items():
        keys.require(name, *accepted)
    kinds = _kinds(keys)
    layers = hybrid_layers(keys, kinds, "linear_attention", _delta(keys))
    clamp = ClampedGate(keys.number("swiglu_limit"), slope=1.0, offset=0.0)
    experts = replace(read_routed_experts(keys, "n_routed_experts", "n_shared_experts"), clamp=clamp)
    config = latent_decoder(
        Keys({**keys.table, "qk_rope_head_dim": 2}, keys.prefix), dense_or_sparse(keys, layers, experts)
    )
    assert config.latent is not None, "a decoder with latent attention"
    latent = replace(config.latent, rope_dim=0, norm_eps=config.norm_eps, indexer=_indexer(keys, kinds))
    return replace(
        config,
        latent=latent,
        attention_scale=None,
        layers=tuple(
            replace(each, use_rope=False, latent_dim=latent.width if each.has_kv else None) for each in config.layers
        ),
        hyper=HyperConfig(
            num_streams=keys.integer("hc_mult", MAX_STREAMS),
            eps=keys.number("hc_eps"),
            share_scale=2.0,
            num_sinkhorn_steps=keys.integer("hc_sinkhorn_iters", 1000),
            has_head=False,
        ),
        mlp_clamp=clamp,
    )


def _keys(hf: Mapping[str, Any]) -> Keys:
    """Return the config with defaults, and with the table of delta nets as transformers reads it."""
    linear = hf.get(_LINEAR)
    if linear is not None and not isinstance(linear, dict):
        raise Keys(hf).error(_LINEAR, "a table")
    table = linear or {}
    found = {ours: table[name] for name, ours in _LINEAR_NAMES.items() if name in table}
    if found.get(_BOUND, 0) is None and table.get("safe_gate", True):
        found[_BOUND] = DEFAULTS[_BOUND]
    keys = Keys({**DEFAULTS, "first_k_dense_replace": _NUM_DENSE, **_FURTHER, **hf, **found, **_NO_ROPE})
    num_dense = min(keys.integer("first_k_dense_replace", MAX_LAYERS, low=0), num_layers(keys))
    return Keys({**keys.table, "first_k_dense_replace": num_dense})


def _kinds(keys: Keys) -> list[str]:
    """Return the kinds of all layers: by `layer_types`, else attention in the last of every four."""
    default = ["linear_attention" if index % 4 != 3 else "full_attention" for index in range(num_layers(keys))]
    names = layer_names(keys, default)
    return ["full_attention" if name in INDEXED else name for name in names]


def _delta(keys: Keys) -> KimiDeltaConfig:
    bound = keys.get(_BOUND)
    if bound is not None and (type(bound) not in (int, float) or not _LEAST_BOUND <= bound < 0):
        raise keys.error(_BOUND, f"null, or a number from {_LEAST_BOUND} to below 0")
    return KimiDeltaConfig(
        num_heads=keys.integer("linear_num_heads", MAX_HEADS),
        head_dim=keys.integer("linear_head_dim", MAX_HEAD_DIM),
        num_taps=keys.integer("linear_conv_kernel_dim", MAX_TAPS, low=2),
        decay_bound=None if bound is None else float(bound),
    )


def _indexer(keys: Keys, kinds: list[str]) -> IndexerConfig:
    """Read the indexer, which every layer with attention has: no two of them follow each other in published models."""
    if any(
        kind == "full_attention" and own != "full"
        for kind, own in zip(kinds, indexer_kinds(keys, len(kinds)), strict=True)
    ):
        raise keys.error("indexer_types", "full for each layer with attention")
    if keys.get("q_lora_rank") is None:
        raise keys.error("q_lora_rank", "an integer: an indexer reads compressed queries")
    pool_size, num_chosen = keys.integer("index_kpool", 1024, low=2), keys.integer("index_topk", MAX_POSITION)
    if num_chosen % pool_size:
        raise keys.error("index_topk", f"a multiple of index_kpool ({pool_size})")
    return IndexerConfig(
        num_heads=keys.integer("index_n_heads", MAX_HEADS),
        head_dim=keys.integer("index_head_dim", MAX_HEAD_DIM),
        num_chosen=num_chosen + pool_size - 1,
        has_adjacent_pairs=False,
        pool_size=pool_size,
    )


def _delta_names(hf: Mapping[str, Any]) -> Mapping[str, str]:
    """Return our name of the mixers of layers with Kimi delta attention, which checkpoints name like attention."""
    kinds = enumerate(_kinds(_keys(with_sizes(_SIZES, hf))))
    return {
        f"layers.{index}.self_attn": f"layers.{index}.linear_attn"
        for index, kind in kinds
        if kind == "linear_attention"
    }


FAMILY = Family(
    ("Glm5NextForCausalLM",),
    decoder_config,
    text_part_of=("Glm5NextForConditionalGeneration",),
    renames={
        "self_attn.o_norm": "self_attn.norm",
        "self_attn.forget_gate": "self_attn",
        **{
            f"hc_{block}_{part}": f"{block}_hc.{ours}"
            for block in ("attn", "ffn")
            for part, ours in {"fn": "fn.weight", "base": "base", "scale": "factors"}.items()
        },
        **HYPER_NAMES,
        "index_kpool_compress_gate": "pool_gate.weight",
        "index_kpool_compress_ape": "pool_bias",
    },
    config_renames=_delta_names,
    mtp="layer",
    mtp_keys=lambda config: {"layer_types": ["full_attention"]},
)
