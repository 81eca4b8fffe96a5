"""EmbeddingGemma 2, for texts: Gemma 4's layers, whose tokens attend in both directions, and a projection of the text's vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.models.families._common import MAX_LAYERS, MAX_WIDTH, build, layer_types, num_layers
from jaxserve.models.families._gemma import with_wide_norms
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION, by_layer_type
from jaxserve.models.families.gemma4 import layer_heads, tables_by_layer

DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 262_144,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "hidden_size_per_layer_input": 512,
    "embedding_dim": 768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": False,
}
"""transformers' defaults, and those of keys that Gemma 4 has as well."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma 4 without a table of embeddings for each layer; its window is the distance of the farthest tokens on either side."""
    keys = Keys({**DEFAULTS, **hf})
    keys, sliding_theta = by_layer_type(keys, 10_000.0)
    config = build(keys, layers=_layers(keys), activation_key="hidden_activation")
    out = HeadLayer(
        "model.embedding_projection", config.hidden_size, keys.integer("embedding_dim", MAX_WIDTH), has_bias=False
    )
    return replace(
        with_wide_norms(config, sliding_theta),
        per_layer_dim=keys.integer("hidden_size_per_layer_input", MAX_WIDTH),
        has_per_layer_table=False,
        has_layer_scales=True,
        is_bidirectional=True,
        head=EmbeddingHead((out,)),
    )


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    count, radius = num_layers(keys), keys.integer("sliding_window", MAX_POSITION)
    period = keys.integer("sliding_window_pattern", MAX_LAYERS)
    default = tuple(bool((index + 1) % period) for index in range(count))
    is_sliding = (*layer_types(keys, radius, default)[:-1], False)  # as transformers forces it
    tables = tables_by_layer(keys, count)
    if tables is None:
        own = {"head_dim": keys.get("global_head_dim"), "num_key_value_heads": keys.get("num_global_key_value_heads")}
        tables = {index: own for index in range(count) if not is_sliding[index]}
    return tuple(
        LayerConfig(radius + 1 if slides else None, **layer_heads(keys, tables, index, is_sliding=slides))
        for index, slides in enumerate(is_sliding)
    )


FAMILY = Family(
    ("EmbeddingGemma2TextModel",),
    decoder_config,
    text_part_of=("EmbeddingGemma2Model",),
    renames={
        "language_model": "model",
        "ple.per_layer_model_projection": "per_layer.projection",
        "ple.per_layer_projection_norm": "per_layer.norm",
        "ple_block.per_layer_input_gate": "per_layer.gate",
        "ple_block.per_layer_projection": "per_layer.projection",
        "ple_block.post_per_layer_input_norm": "per_layer.norm",
    },
    only_embeds=True,
)
