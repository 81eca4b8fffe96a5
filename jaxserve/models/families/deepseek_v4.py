"""DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.compressed import CompressedConfig, Compression
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.hyper import HyperConfig
from jaxserve.model_config.latent import IndexerConfig
from jaxserve.models.families._common import (
    COMMON_DEFAULTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    build,
    num_layers,
)
from jaxserve.models.families._experts import COUNT_KEYS, PART_NAMES, read_experts, with_clamp
from jaxserve.models.families._hyper import HYPER_NAMES, MAX_STREAMS
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS = dict(
    {key: value for key, value in COMMON_DEFAULTS.items() if key != "num_key_value_heads"},
    num_key_value_heads=1,
    attention_bias=False,
    mlp_bias=False,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=6,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    q_lora_rank=1024,
    sliding_window=128,
    index_topk=512,
    index_n_heads=64,
    index_head_dim=128,
    hc_mult=4,
    hc_eps=1e-6,
    hc_sinkhorn_iters=20,
    swiglu_limit=10.0,
)
_SIZES: Final[Mapping[str, Any]] = {
    "head_dim": 512,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "compress_rope_theta": 160_000.0,
    "scoring_func": "sqrtsoftplus",
    "num_hash_layers": 3,
}
"""transformers' defaults of further keys."""
_WINDOW, _SPARSE, _DENSE = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS: Final = {0: _WINDOW, 4: _SPARSE, 128: _DENSE}
"""Kinds of layers by `compress_ratios`."""
_RATES: Final = {_SPARSE: ("compress_rate_csa", 4), _DENSE: ("compress_rate_hca", 128)}
"""Older key, and default, of the tokens of a block."""
_SCORES: Final[Mapping[str, Literal["sqrt_softplus", "sigmoid"]]] = {
    "sqrtsoftplus": "sqrt_softplus",
    "sigmoid": "sigmoid",
}
_FRACTION: Final = "partial_rotary_factor"
_WIDTH: Final = "intermediate_size"
_ONE_GROUP: Final = ("n_group", "topk_group")


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """One vector per token, windows, compressed blocks that indexers choose or not, hashed and routed experts, hyper-connections."""
    keys = Keys({**DEFAULTS, **_SIZES, **hf})
    if keys.get(_WIDTH) is not None:  # another name of the same width, which transformers prefers
        keys = Keys({**keys.table, "moe_" + _WIDTH: keys.get(_WIDTH)}, keys.prefix)
    _require_computed(keys)
    dim, heads = keys.integer("head_dim", MAX_HEAD_DIM, low=2), keys.integer("num_attention_heads", MAX_HEADS)
    keys, rope_dim, main_theta = _with_rope(keys, dim)
    layers = tuple(
        replace(layer, experts=experts)
        for layer, experts in zip(_attention(keys, rope_dim), _experts(keys), strict=True)
    )
    groups = keys.integer("o_groups", heads)
    if heads % groups:
        raise keys.error("o_groups", f"a divisor of num_attention_heads ({heads})")
    shared = {"head_dim": rope_dim, "num_key_value_heads": groups, _WIDTH: keys.get("moe_" + _WIDTH)}
    own = Keys({key: value for key, value in {**keys.table, **shared}.items() if key != "sliding_window"}, keys.prefix)
    config = build(own, layers=layers, qkv_bias=False, computed=(*COUNT_KEYS, "n_shared_experts"))
    compressed = CompressedConfig(
        dim=dim,
        rope_dim=rope_dim,
        query_rank=keys.integer("q_lora_rank", MAX_WIDTH),
        window=keys.integer("sliding_window", MAX_POSITION),
        num_groups=groups,
        group_rank=keys.integer("o_lora_rank", MAX_WIDTH),
    )
    hyper = HyperConfig(
        keys.integer("hc_mult", MAX_STREAMS),
        keys.number("hc_eps"),
        share_scale=2.0,
        num_sinkhorn_steps=keys.integer("hc_sinkhorn_iters", 1000),
    )
    return replace(
        config,
        compressed=compressed,
        hyper=hyper,
        mlp_clamp=layers[0].experts.clamp if layers[0].experts else None,
        norm_weights="wide",
        rotary_pairs="adjacent",
        sliding_rope_theta=main_theta,
    )


def _require_computed(keys: Keys) -> None:
    """Raise CheckpointError for values that are not computed."""
    keys.require("attention_bias", False)
    keys.require("hidden_act", "silu")
    keys.require("n_shared_experts", 1)
    keys.require("norm_topk_prob", True)
    keys.require("num_key_value_heads", 1, None)
    keys.require("topk_method", "noaux_tc", None)
    for key in _ONE_GROUP:
        keys.require(key, 1, None)


def _with_rope(keys: Keys, dim: int) -> tuple[Keys, int, float]:
    """Return keys whose rope is that of layers with blocks, the numbers of a vector that rotate, and the rope base of other layers.

    A table without `main` and `compress` is that of layers with blocks, but for its base and the factor on cosine and sine.
    """
    name, fraction = "rope_parameters", 64 / 512
    table = keys.get(name) or keys.get("rope_scaling") or {}
    if not isinstance(table, dict):
        raise keys.error(name, "a table, or tables main and compress")
    if keys.get(_FRACTION) is not None:
        fraction = keys.number(_FRACTION, high=1.0)
    elif keys.get("qk_rope_head_dim") is not None:
        fraction = keys.integer("qk_rope_head_dim", dim, low=2) / dim
    main, own = table.get("main"), table.get("compress")
    if isinstance(main, dict) and isinstance(own, dict):
        given = [
            Keys({_FRACTION: 1.0, **each}, f"{name}.{label}.") for label, each in (("main", main), ("compress", own))
        ]
        given[0].require("rope_type", "default", None)
        fraction = given[0].number(_FRACTION, high=1.0)
        given[1].require(_FRACTION, fraction)
        theta = given[0].number("rope_theta", low=1.0)
    else:
        theta = keys.number("rope_theta", low=1.0)
        own = {**table, "rope_theta": keys.number("compress_rope_theta", low=1.0)}
        if (own.get("rope_type") or own.get("type")) == "yarn":
            own = {"attention_factor": 1.0, **own}
    rope_dim = int(dim * fraction)
    if rope_dim < 2 or rope_dim % 2:
        raise keys.error(_FRACTION, f"a fraction of {dim} numbers that is an even number of them")
    own = {key: value for key, value in own.items() if key != _FRACTION}
    rest = {key: value for key, value in keys.table.items() if key not in (_FRACTION, "rope_scaling")}
    return Keys({**rest, name: own}, keys.prefix), rope_dim, theta


def _attention(keys: Keys, rope_dim: int) -> list[LayerConfig]:
    """Return the layers without experts."""
    rates = keys.get("compress_rates") or {}
    if not isinstance(rates, dict):
        raise keys.error("compress_rates", f"a table of {_SPARSE} and {_DENSE}")
    indexer = IndexerConfig(
        num_heads=keys.integer("index_n_heads", MAX_HEADS),
        head_dim=keys.integer("index_head_dim", MAX_HEAD_DIM, low=rope_dim),
        num_chosen=keys.integer("index_topk", MAX_POSITION),
        has_adjacent_pairs=True,
        rotates_last=True,
    )

    def blocks(kind: str) -> Compression:
        old, default = _RATES[kind]
        table = {kind: rates.get(kind, default)} if keys.get(old) is None else {kind: keys.get(old)}
        rate = Keys(table, "compress_rates.").integer(kind, MAX_POSITION)
        return Compression(rate, overlaps=kind == _SPARSE, indexer=indexer if kind == _SPARSE else None)

    window = keys.integer("sliding_window", MAX_POSITION)
    made = {kind: LayerConfig(compression=blocks(kind)) for kind in _RATES} | {_WINDOW: LayerConfig(window)}
    return [made[kind] for kind in _kinds(keys)]


def _kinds(keys: Keys) -> list[str]:
    """Return the kind of each layer: by `layer_types`, else by `compress_ratios`, else as in DeepSeek-V4-Pro."""
    count, key = num_layers(keys), "layer_types"
    found, known = keys.get(key), sorted(_RATIOS.values())
    if found is None and keys.get("compress_ratios") is not None:
        key, known = "compress_ratios", sorted(map(str, _RATIOS))
        found = keys.get(key)
        if isinstance(found, list):
            found = [_RATIOS.get(each) if type(each) is int else None for each in found]
    elif found is None:
        return [_DENSE if index < 2 or index % 2 == 0 else _SPARSE for index in range(count)]
    if not isinstance(found, list) or len(found) < count or any(each not in _RATIOS.values() for each in found):
        raise keys.error(key, f"{', '.join(known)} for each of the {count} layers")
    return found[:count]


def _experts(keys: Keys) -> list[ExpertsConfig]:
    """Return the experts of each layer, which a table of tokens chooses in those called hash_moe or in the first ones."""
    count, names = num_layers(keys), keys.get("mlp_layer_types")
    if names is None:
        first = keys.integer("num_hash_layers", MAX_LAYERS, low=0)
        names = ["hash_moe" if index < first else "moe" for index in range(count)]
    if not isinstance(names, list) or len(names) != count or not {*names} <= {"hash_moe", "moe"}:
        raise keys.error("mlp_layer_types", f"hash_moe or moe for each of the {count} layers")
    if keys.get("scoring_func") not in _SCORES:
        raise keys.error("scoring_func", " or ".join(_SCORES))
    experts = read_experts(keys, "n_routed_experts", "moe_intermediate_size", is_normalized=True)
    experts = replace(
        with_clamp(keys, experts),
        score=_SCORES[keys.get("scoring_func")],
        has_correction_bias=True,
        weight_scale=keys.number("routed_scaling_factor"),
        shared_intermediate_size=experts.intermediate_size,
    )
    hashed = replace(experts, is_hashed=True, has_correction_bias=False)
    return [hashed if name == "hash_moe" else experts for name in names]


FAMILY = Family(
    ("DeepseekV4ForCausalLM",),
    decoder_config,
    renames={
        **HYPER_NAMES,
        "indexer.compressor": "compressor.indexer",
        "attn.indexer.weights_proj": "attn.compressor.indexer.weights_proj",
        "attn.indexer.wq_b": "attn.compressor.indexer.q_b_proj",
        "attn.wq_b": "attn.q_b_proj",
        "scorer.weights_proj": "weights_proj",
        "compressor.norm": "compressor.kv_norm",
        "compressor.indexer.norm": "compressor.indexer.kv_norm",
        "gate.bias": "gate.e_score_correction_bias",
        "embed": "embed_tokens",
        "head": "lm_head",
        "hc_head_fn": "hc_head.fn.weight",
        "hc_head_base": "hc_head.base",
        "hc_head_scale": "hc_head.factors",
        "hc_attn_fn": "attn_hc.fn.weight",
        "hc_attn_base": "attn_hc.base",
        "hc_attn_scale": "attn_hc.factors",
        "hc_ffn_fn": "ffn_hc.fn.weight",
        "hc_ffn_base": "ffn_hc.base",
        "hc_ffn_scale": "ffn_hc.factors",
        "attn": "self_attn",
        "ffn": "mlp",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_sink": "sinks",
        "ape": "position_bias",
        "wq_a": "q_a_proj",
        "q_norm": "q_a_norm",
        "wkv": "kv_proj",
        "wgate": "gate_proj",
        "wo_a": "o_a_proj",
        "wo_b": "o_b_proj",
        **PART_NAMES,
        "scale": "weight_scale_inv",
    },
    stacked_experts="halves",
)
