"""Configs of encoders are read, or rejected in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.encoder import distance_buckets
from jaxserve.models.encoders.bert import encoder_config
from jaxserve.models.registry import encoder_architectures
from jaxserve.types import LabelActivation

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


def read_any(hf: dict[str, Any]) -> EncoderConfig:
    return encoder_architectures()[hf["architectures"][0]](hf)


def labelling(
    inner: str, outer: str, activation: LabelActivation, labels: tuple[str, ...] = ("LABEL_0",)
) -> EmbeddingHead:
    layers = HeadLayer(inner, 32, 32, activation="tanh"), HeadLayer(outer, 32, len(labels))
    return EmbeddingHead(layers, "cls", labels, activation)


def test_defaults_are_those_of_transformers() -> None:
    assert read() == EncoderConfig(100, 32, 64, 4, 2, 66, 2, 1e-12, "gelu", 0)
    assert read().max_position == 66


def test_roberta_positions_begin_after_the_padding_token() -> None:
    assert (read("XLMRobertaModel").first_position, read("XLMRobertaModel").max_position) == (2, 64)
    assert read("RobertaModel", pad_token_id=0).first_position == 1


@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta"])
def test_a_class_with_a_head_for_tokens_is_the_encoder_without_it(name: str) -> None:
    assert read(f"{name}ForMaskedLM") == read(f"{name}Model")


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
    ],
)
def test_score_activation_is_read_from_the_checkpoint(keys: dict[str, Any], activation: LabelActivation) -> None:
    config = read("BertForSequenceClassification", id2label={"0": "LABEL_0"}, **keys)
    assert config.head == labelling("pooler.dense", "classifier", activation)
    roberta = read("XLMRobertaForSequenceClassification", num_labels=1, **keys)
    assert roberta.head == labelling("classifier.dense", "classifier.out_proj", activation)


@pytest.mark.parametrize(
    ("keys", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),  # transformers leaves out its default
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), "softmax"),
        ({"id2label": {"1": "no", "0": "yes"}, "num_labels": 9}, ("yes", "no"), "softmax"),
        ({"problem_type": "single_label_classification"}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"problem_type": "regression"}, ("LABEL_0", "LABEL_1"), "none"),
    ],
)
def test_labels_of_a_classifier_are_read_from_the_checkpoint(
    keys: dict[str, Any], labels: tuple[str, ...], activation: LabelActivation
) -> None:
    head = read("BertForSequenceClassification", **keys).head
    assert head == labelling("pooler.dense", "classifier", activation, labels)


def test_published_keys_of_nomic_bert_mean_what_those_of_transformers_mean() -> None:
    published = {
        "architectures": ["NomicBertModel"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 64,
        "n_positions": 66,
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_scaling_factor": None,
        "qkv_proj_bias": False,
        "prenorm": False,
        "vocab_size": 100,
        "type_vocab_size": 2,
    }
    assert read_any(published) == read_any({**BERT, "architectures": ["NomicBertModel"]})
    assert (read_any(published).rope_theta, read_any(published).is_gated) == (1000.0, True)
    for key, value in (
        ("qkv_proj_bias", True),
        ("rotary_emb_fraction", 0.5),
        ("num_experts", 8),
        ("rotary_scaling_factor", 2.0),
    ):
        with pytest.raises(CheckpointError, match=f"{key} is "):
            read_any({**published, key: value})


def test_distances_of_mpnet_have_buckets_that_grow() -> None:
    found = distance_buckets(np.array([-500, -128, -20, -8, -7, 0, 1, 8, 500]), 32)
    assert found.tolist() == [15, 15, 10, 8, 7, 0, 17, 24, 31]


def test_encoders_without_token_types_or_positions_of_their_own_are_read() -> None:
    mpnet = read_any({**BERT, "architectures": ["MPNetForMaskedLM"], "pad_token_id": 5})
    assert (mpnet.num_token_types, mpnet.first_position, mpnet.max_position) == (0, 2, 64)
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "activation": "relu"}
    distil = read_any({"architectures": ["DistilBertModel"], "vocab_size": 9, "max_position_embeddings": 8, **sizes})
    assert (distil.num_token_types, distil.norm_eps, distil.activation) == (0, 1e-12, "relu")
    with pytest.raises(CheckpointError, match="relative_attention_num_buckets is 64; supported: 32"):
        read_any({**BERT, "architectures": ["MPNetModel"], "relative_attention_num_buckets": 64})
    scaled = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    with pytest.raises(CheckpointError, match="supported: rope without scaling"):
        read_any({**BERT, "architectures": ["GteModel"], **scaled})


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("BertModel", {"is_decoder": True}, "is_decoder is true"),
        ("BertModel", {"hidden_size": 30}, "hidden_size is 30; supported: a multiple of num_attention_heads (4)"),
        ("BertModel", {"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ("BertModel", {"quantization_config": {"quant_method": "gptq"}}, "quant_method is 'gptq'"),
        ("RobertaModel", {"max_position_embeddings": 2}, "max_position_embeddings is 2"),
        ("BertForSequenceClassification", {"num_labels": 10**9}, "num_labels is 1000000000; supported: an integer"),
        ("BertForSequenceClassification", {"id2label": {"0": "no", "2": "yes"}}, "id2label is "),
        ("BertForSequenceClassification", {"id2label": {"0": "no", "1": 1}}, "id2label is "),
        ("BertForSequenceClassification", {"id2label": ["no", "yes"]}, "id2label is "),
        ("BertForSequenceClassification", {"id2label": {}}, "id2label is {}; supported: names of 1 to"),
        ("BertForSequenceClassification", {"problem_type": "ranking"}, "problem_type is 'ranking'; supported: single_"),
        (
            "BertForSequenceClassification",
            {"num_labels": 1, "problem_type": "multi_label_classification"},
            "problem_type is 'multi_label_classification'; supported: null or 'regression'",
        ),
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
