"""Configs of encoders are read, or rejected in one line."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.encoders.bert import encoder_config

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}


def read(architecture: str = "BertModel", **keys: Any) -> EncoderConfig:
    return encoder_config({**BERT, "architectures": [architecture], **keys})


def scoring(inner: str, outer: str, is_sigmoid: bool) -> EmbeddingHead:
    layers = HeadLayer(inner, 32, 32, activation="tanh"), HeadLayer(outer, 32, 1)
    return EmbeddingHead(layers, "cls", scores_pairs=True, is_sigmoid=is_sigmoid)


def test_defaults_are_those_of_transformers() -> None:
    assert read() == EncoderConfig(100, 32, 64, 4, 2, 66, 2, 1e-12, "gelu", 0)
    assert read().max_position == 66


def test_roberta_positions_begin_after_the_padding_token() -> None:
    assert (read("XLMRobertaModel").first_position, read("XLMRobertaModel").max_position) == (2, 64)
    assert read("RobertaModel", pad_token_id=0).first_position == 1


@pytest.mark.parametrize(
    ("keys", "is_sigmoid"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
    ],
)
def test_score_activation_is_read_from_the_checkpoint(keys: dict[str, Any], is_sigmoid: bool) -> None:
    config = read("BertForSequenceClassification", id2label={"0": "LABEL_0"}, **keys)
    assert config.head == scoring("pooler.dense", "classifier", is_sigmoid)
    roberta = read("XLMRobertaForSequenceClassification", num_labels=1, **keys)
    assert roberta.head == scoring("classifier.dense", "classifier.out_proj", is_sigmoid)


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("BertModel", {"is_decoder": True}, "is_decoder is true"),
        ("BertModel", {"hidden_size": 30}, "hidden_size is 30; supported: a multiple of num_attention_heads (4)"),
        ("BertModel", {"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ("BertModel", {"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'"),
        ("RobertaModel", {"max_position_embeddings": 2}, "max_position_embeddings is 2"),
        ("BertForSequenceClassification", {}, "num_labels is null; supported: one label"),
        ("BertForSequenceClassification", {"id2label": {"0": "no", "1": "yes"}}, "id2label is "),
        (
            "BertForSequenceClassification",
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            "sentence_transformers.activation_fn is 'torch.nn.Tanh'; supported: Sigmoid or Identity",
        ),
    ],
)
def test_unsupported_encoder_configs_are_rejected(architecture: str, keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(architecture, **keys)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
