"""MiniMax-M3 and the text part of its multimodal checkpoints: grouped-query attention to blocks of tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ClampedGate, ExpertsConfig
from jaxserve.model_config.indexer import BlockIndexerConfig
from jaxserve.models.families import minimax_m2
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, build, num_layers, with_sizes
from jaxserve.models.families._experts import COUNT_KEYS, dense_or_sparse, read_experts
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

DEFAULTS: Final[Mapping[str, Any]] = minimax_m2.DEFAULTS | {
    "num_key_value_heads": 4,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "dense_intermediate_size": 12_288,
    "shared_intermediate_size": 3072,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 200_064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "max_position_embeddings": 524_288,
}
"""transformers' defaults of further keys, which a text part may leave out."""
_IMPLIED: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu", "swigluoai"),
    "use_gemma_norm": (True, None),
    "use_qk_norm": (True, None),
    "qk_norm_type": ("per_head", None),
    "scoring_func": ("sigmoid", None),
    "use_routing_bias": (True, None),
    "n_shared_experts": (1, None),
    "attention_bias": (False, None),
}
"""Keys that published configs have and transformers ignores, with the values that say what it computes."""
_SPARSE: Final = "sparse_attention_config"
_SPARSE_NAMES: Final[Mapping[str, str]] = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""Names of transformers, by those in the table `sparse_attention_config` of published configs."""
_SPARSE_IMPLIED: Final[Mapping[str, tuple[object, ...]]] = {
    "use_sparse_attention": (True, None),
    "sparse_score_type": ("max", None),
    "sparse_init_block": (0, None),
}
_FREQUENCY, _NO_VALUES = "sparse_attention_freq", "sparse_disable_index_value"
_KINDS: Final[Mapping[str, bool]] = {"full_attention": False, "minimax_m3_sparse": True}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Partial rotation, norms of each head, all norms stored minus 1, clamped gates, and sigmoid-routed and shared experts."""
    keys = _keys(with_sizes(_SIZES, hf))
    clamp = ClampedGate(keys.number("swiglu_limit"), keys.number("swiglu_alpha"))
    layers = _with_experts(keys, _with_indexers(keys), clamp)
    dense = {"intermediate_size": keys.integer("dense_intermediate_size", MAX_WIDTH), "hidden_act": "silu"}
    computed = (*COUNT_KEYS, "partial_rotary_factor", "n_shared_experts")
    config = build(Keys({**keys.table, **dense}, keys.prefix), layers=layers, qkv_bias=False, computed=computed)
    rotary_dim = config.rotary_dim or config.head_dim
    keys.require("rotary_dim", rotary_dim, None)
    for layer in layers:
        if layer.blocks is not None:
            keys.integer("index_head_dim", MAX_HEAD_DIM, low=rotary_dim)
            if config.num_kv_heads % layer.blocks.num_heads:
                raise keys.error("index_n_heads", f"a divisor of num_key_value_heads ({config.num_kv_heads})")
    return replace(config, qk_norm="heads", norm_weights="offset", mlp_clamp=clamp)


def _keys(hf: Mapping[str, Any]) -> Keys:
    """Return the config with defaults, and with the table of sparse attention as transformers reads it."""
    table = hf.get(_SPARSE)
    if table is not None and not isinstance(table, dict):
        raise Keys(hf).error(_SPARSE, "a table")
    sparse = Keys(table or {}, f"{_SPARSE}.")
    for name, accepted in _SPARSE_IMPLIED.items():
        sparse.require(name, *accepted)
    for name in sparse.table:
        if name not in {*_SPARSE_NAMES, *_SPARSE_IMPLIED, _FREQUENCY, _NO_VALUES}:
            sparse.require(name, None)
    found = {ours: sparse.table[name] for name, ours in _SPARSE_NAMES.items() if name in sparse.table}
    keys = Keys({**DEFAULTS, "partial_rotary_factor": 1.0, **hf, **found})
    for name, accepted in _IMPLIED.items():
        keys.require(name, *accepted)
    keys.require("sliding_window", None)
    lists = {}
    if keys.get("layer_types") is None:
        flags = _flags(sparse, _FREQUENCY, num_layers(keys), default=False)
        lists["layer_types"] = ["minimax_m3_sparse" if flag else "full_attention" for flag in flags]
        without_values = _flags(sparse, _NO_VALUES, num_layers(keys), default=True)
        if any(is_sparse > has_none for is_sparse, has_none in zip(flags, without_values, strict=True)):
            raise sparse.error(_NO_VALUES, "1 for each layer with an indexer: values of indexers are not computed")
    if keys.get("mlp_layer_types") is None:
        flags = _flags(keys, "moe_layer_freq", num_layers(keys), default=True)
        lists["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
    return Keys({**keys.table, **lists})


def _flags(keys: Keys, name: str, count: int, *, default: bool) -> list[bool]:
    """Read a list of 0 or 1 for each layer."""
    found = keys.get(name)
    if found is None:
        return [default] * count
    if not isinstance(found, list) or len(found) != count or any(flag not in (0, 1) for flag in found):
        raise keys.error(name, f"0 or 1 for each of the {count} layers")
    return [bool(flag) for flag in found]


def _with_indexers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which those that `layer_types` calls sparse have an indexer."""
    names, count = keys.get("layer_types"), num_layers(keys)
    if not isinstance(names, list) or len(names) != count or any(name not in _KINDS for name in names):
        raise keys.error("layer_types", f"{' or '.join(_KINDS)} for each of the {count} layers")
    if not any(_KINDS[name] for name in names):
        return (LayerConfig(),) * count
    num_blocks = keys.integer("index_topk_blocks", MAX_POSITION)
    blocks = BlockIndexerConfig(
        num_heads=keys.integer("index_n_heads", MAX_HEADS),
        head_dim=keys.integer("index_head_dim", MAX_HEAD_DIM),
        block_size=keys.integer("index_block_size", MAX_POSITION),
        num_blocks=num_blocks,
        num_local=keys.integer("index_local_blocks", num_blocks, low=0),
    )
    return tuple(LayerConfig(blocks=blocks if _KINDS[name] else None) for name in names)


def _with_experts(keys: Keys, layers: tuple[LayerConfig, ...], clamp: ClampedGate) -> tuple[LayerConfig, ...]:
    experts: ExpertsConfig = replace(
        read_experts(keys, "num_local_experts", "intermediate_size", is_normalized=True),
        score="sigmoid",
        has_correction_bias=True,
        weight_scale=keys.number("routed_scaling_factor"),
        shared_intermediate_size=keys.integer("shared_intermediate_size", MAX_WIDTH),
        clamp=clamp,
    )
    return dense_or_sparse(keys, layers, experts)


FAMILY = Family(
    ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForCausalLM"),
    decoder_config,
    text_part_of=("MiniMaxM3SparseForConditionalGeneration",),
    renames={
        **minimax_m2.FAMILY.renames,
        "gate.e_score_correction_bias": "e_score_correction_bias",
        **{f"index_{name}": f"indexer.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
    },
    stacked_experts="halves",
    mtp="minimax_m3",
    mtp_keys=lambda config: {"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["sparse"]},
)
