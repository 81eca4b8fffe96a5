"""BERT and models with its layers: MiniLM, BGE, E5, GTE (BertModel), and RoBERTa, which counts positions from 2.

With a head for one label they are cross-encoders, which score pairs of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.families._common import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    read_activation,
    reject_quantized,
)
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION
from jaxserve.models.families._scoring import scoring_head

SCORERS = ("BertForSequenceClassification", "RobertaForSequenceClassification", "XLMRobertaForSequenceClassification")
ARCHITECTURES = ("BertModel", "RobertaModel", "XLMRobertaModel", *SCORERS)
DEFAULTS: Mapping[str, Any] = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0}
ROBERTA_DEFAULTS: Mapping[str, Any] = {"pad_token_id": 1}
MAX_TOKEN_TYPES = 16


def encoder_config(hf: dict[str, Any]) -> EncoderConfig:
    """Read an encoder with absolute positions; reject decoder configs of the same class."""
    name = hf["architectures"][0]
    is_roberta = not name.startswith("Bert")
    keys = Keys({**DEFAULTS, **(ROBERTA_DEFAULTS if is_roberta else {}), **hf})
    reject_quantized(keys)
    keys.require("position_embedding_type", "absolute", None)
    keys.require("is_decoder", False, None)
    keys.require("add_cross_attention", False, None)
    num_heads = keys.integer("num_attention_heads", MAX_HEADS)
    hidden_size = keys.integer("hidden_size", MAX_WIDTH)
    if hidden_size % num_heads:
        raise keys.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    first = keys.integer("pad_token_id", MAX_VOCAB_SIZE, low=0) + 1 if is_roberta else 0
    return EncoderConfig(
        vocab_size=keys.integer("vocab_size", MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", MAX_WIDTH),
        num_heads=num_heads,
        num_layers=keys.integer("num_hidden_layers", MAX_LAYERS),
        num_positions=keys.integer("max_position_embeddings", MAX_POSITION, low=first + 1),
        num_token_types=keys.integer("type_vocab_size", MAX_TOKEN_TYPES),
        norm_eps=keys.number("layer_norm_eps"),
        activation=read_activation(keys),
        first_position=first,
        head=_scoring_head(keys, hidden_size, is_roberta=is_roberta) if name in SCORERS else None,
    )


def _scoring_head(keys: Keys, hidden_size: int, *, is_roberta: bool) -> EmbeddingHead:
    """Return the scoring head: two layers over the first token's vector."""
    inner, outer = ("classifier.dense", "classifier.out_proj") if is_roberta else ("pooler.dense", "classifier")
    layers = HeadLayer(inner, hidden_size, hidden_size, activation="tanh"), HeadLayer(outer, hidden_size, 1)
    return scoring_head(keys, layers, "cls")
