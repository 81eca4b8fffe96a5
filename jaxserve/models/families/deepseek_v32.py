"""DeepSeek-V3.2 (arXiv 2512.02556)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import deepseek_v3
from jaxserve.models.families._common import MAX_LAYERS, full_layers, num_layers
from jaxserve.models.families._experts import dense_or_sparse, with_sigmoid_router
from jaxserve.models.families._indexer import GGUF_NAMES, gguf_indexer_config, with_indexer, without_indexer
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder, read_deepseek_experts

DEFAULTS = dict(deepseek_v3.DEFAULTS, index_topk=2048, index_n_heads=64, index_head_dim=128, mlp_bias=False)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek-V3 with an indexer in each layer."""
    keys = Keys({**DEFAULTS, "rope_interleave": True, **hf})
    keys.require("indexer_rope_interleave", False, None)
    return with_indexer(keys, dense_attention(keys), has_adjacent_pairs=False)


def dense_attention(keys: Keys) -> DecoderConfig:
    """Read all keys but those of the indexer."""
    keys = without_indexer(keys)
    num_dense = min(keys.integer("first_k_dense_replace", MAX_LAYERS, low=0), num_layers(keys))
    keys = Keys({**keys.table, "first_k_dense_replace": num_dense}, keys.prefix)
    keys.require("rope_interleave", True)
    keys.require("scoring_func", "sigmoid", None)
    keys.require("topk_method", "noaux_tc", None)
    experts = read_deepseek_experts(keys, with_sigmoid_router, is_normalized=keys.flag("norm_topk_prob"))
    return latent_decoder(keys, dense_or_sparse(keys, full_layers(keys), experts))


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of latent attention, indexers and experts; raise CheckpointError if a layer has no indexer."""
    found = gguf_indexer_config(keys, config)
    if "shared" in found["indexer_types"]:
        layer = found["indexer_types"].index("shared")
        keys.fail("block_count", f"layers that have an indexer each; layer {layer} has none", keys.get("block_count"))
    return found


FAMILY = Family(
    ("DeepseekV32ForCausalLM",),
    decoder_config,
    mtp="layer",
    gguf=GGUFArchitecture(
        "deepseek32",
        has_latent_attention=True,
        tensor_names=GGUF_NAMES,
        experts="required",
        config=_gguf_config,
    ),
)
