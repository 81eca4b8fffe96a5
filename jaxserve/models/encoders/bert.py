"""BERT and models with its layers: MiniLM, BGE, E5, GTE (BertModel), and RoBERTa, which counts positions from 2.

With a head for one label they are cross-encoders, which score pairs of texts; with more labels they are classifiers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.model_config.embedding_head import HeadLayer
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.encoders._common import MAX_TOKEN_TYPES, read_encoder
from jaxserve.models.families._common import MAX_VOCAB_SIZE
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._labels import label_head

SCORERS = ("BertForSequenceClassification", "RobertaForSequenceClassification", "XLMRobertaForSequenceClassification")
LANGUAGE_MODELS = ("BertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaForMaskedLM")
"""Classes with a head for tokens, which is not read: published models name that of the model that they were trained from."""
ARCHITECTURES = ("BertModel", "RobertaModel", "XLMRobertaModel", *LANGUAGE_MODELS, *SCORERS)
DEFAULTS: Mapping[str, Any] = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0}
ROBERTA_DEFAULTS: Mapping[str, Any] = {"pad_token_id": 1}


def encoder_config(hf: dict[str, Any]) -> EncoderConfig:
    """Read an encoder with absolute positions."""
    name = hf["architectures"][0]
    is_roberta = not name.startswith("Bert")
    keys = Keys({**DEFAULTS, **(ROBERTA_DEFAULTS if is_roberta else {}), **hf})
    keys.require("position_embedding_type", "absolute", None)
    keys.integer("type_vocab_size", MAX_TOKEN_TYPES)
    first = keys.integer("pad_token_id", MAX_VOCAB_SIZE, low=0) + 1 if is_roberta else 0
    config = read_encoder(keys, first_position=first)
    if name not in SCORERS:
        return config
    inner, outer = ("classifier.dense", "classifier.out_proj") if is_roberta else ("pooler.dense", "classifier")
    return with_first_token_head(config, keys, inner, outer)


def with_first_token_head(
    config: EncoderConfig, keys: Keys, inner: str, outer: str, activation: Any = "tanh"
) -> EncoderConfig:
    """Return the config with a head for labels of two layers over the first token's vector, by their names in checkpoints."""
    d = config.hidden_size
    layers = HeadLayer(inner, d, d, activation=activation), HeadLayer(outer, d, 1)
    return replace(config, head=label_head(keys, layers, "cls"))
