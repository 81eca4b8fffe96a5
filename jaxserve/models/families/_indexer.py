"""Keys of families whose latent attention goes to the tokens that an indexer chooses (DeepSeek Sparse Attention)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.gguf.architecture import GGUFKeys, dense_layers, no_window
from jaxserve.checkpoint.gguf.latent import TENSOR_NAMES, latent_config
from jaxserve.checkpoint.gguf.routing import SIGMOID, check_gating, router_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.latent import IndexerConfig
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

_SIZES: Final = ("index_topk", "index_n_heads", "index_head_dim")
INDEXED: Final = {"indexed_attention", "deepseek_sparse_attention"}
"""Names of layers with an indexer, or that take what an earlier one has chosen."""
_LETTERS: Final = {"F": "full", "S": "shared"}


GGUF_NAMES: Final[Mapping[str, str]] = {
    **TENSOR_NAMES,
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
"""Names of a layer's parts by llama.cpp's."""


def gguf_indexer_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `config.json` for latent attention, indexers and experts. Layers whose indexer has no tensors take the
    choices of an earlier one."""
    check_gating(keys, SIGMOID)
    layers, dense = range(config["num_hidden_layers"]), dense_layers(keys, config)
    has_indexer = [f"blk.{layer}.indexer.attn_k.weight" in keys.file.tensors for layer in layers]
    return {
        **no_window(keys, config),
        **latent_config(keys, config),
        **router_config(keys, config),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in layers],
        "index_n_heads": keys.integer("attention.indexer.head_count"),
        "index_head_dim": keys.integer("attention.indexer.key_length"),
        "index_topk": keys.integer("attention.indexer.top_k"),
        "indexer_types": ["full" if is_full else "shared" for is_full in has_indexer],
    }


def without_indexer(keys: Keys) -> Keys:
    """Return the keys of a decoder whose queries attend to all tokens. `layer_types` may only name the one kind of layer."""
    names = keys.get("layer_types")
    if names is not None and (not isinstance(names, list) or not {*names} <= INDEXED):
        raise keys.error("layer_types", "indexed_attention for each layer")
    table = {key: value for key, value in keys.table.items() if key not in (*_SIZES, "layer_types")}
    return Keys(table, keys.prefix)


def with_indexer(
    keys: Keys,
    config: DecoderConfig,
    *,
    has_adjacent_pairs: bool,
    kinds: tuple[str, ...] | None = None,
    reads_inputs: bool = False,
) -> DecoderConfig:
    """Add an indexer to the layers. kinds: "full" for a layer with one, "shared" for one after it; None: all have one.

    reads_inputs: see `IndexerConfig`.
    """
    latent = config.latent
    assert latent is not None, "a decoder with latent attention"
    if latent.query_rank is None and not reads_inputs:
        raise keys.error("q_lora_rank", "an integer: an indexer reads compressed queries")
    indexer = IndexerConfig(
        num_heads=keys.integer("index_n_heads", MAX_HEADS),
        head_dim=keys.integer("index_head_dim", MAX_HEAD_DIM, low=latent.rope_dim),
        num_chosen=keys.integer("index_topk", MAX_POSITION),
        has_adjacent_pairs=has_adjacent_pairs,
        reads_inputs=reads_inputs,
    )
    layers, source = list(config.layers), 0
    for index, kind in enumerate(kinds or ("full",) * len(layers)):
        source = index if kind == "full" else source
        layers[index] = replace(layers[index], index_source=None if source == index else source)
    return replace(config, latent=replace(latent, indexer=indexer), layers=tuple(layers))


def indexer_kinds(keys: Keys, num_layers: int) -> tuple[str, ...]:
    """Return which layers have an indexer: by `indexer_types`, a pattern of letters, or one of every so many layers."""
    key = "indexer_types" if keys.get("indexer_types") is not None else "index_topk_pattern"
    names = keys.get(key)
    if names is None:
        period = keys.integer("index_topk_freq", MAX_LAYERS)
        offset = keys.integer("index_skip_topk_offset", MAX_LAYERS, low=1)
        names = ["full" if max(index - offset + 1, 0) % period == 0 else "shared" for index in range(num_layers)]
    elif isinstance(names, str):
        names = [_LETTERS.get(letter, letter) for letter in names]
    known = _LETTERS.values()
    if not isinstance(names, list) or len(names) != num_layers or any(name not in known for name in names):
        raise keys.error(key, f"full or shared for each of the {num_layers} layers")
    if names[0] != "full":
        raise keys.error(key, "full for the first layer")
    return tuple(names)
