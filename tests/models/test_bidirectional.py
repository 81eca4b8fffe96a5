"""Configs of decoders whose tokens attend in both directions are read, or rejected in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.checkpoint.renamed import text_config
from jaxserve.errors import CheckpointError
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.models.registry import decoder_config, families, only_embeds
from tests.models.goldens import DATA

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}
MODERNBERT: dict[str, Any] = {**SIZES, "architectures": ["ModernBertModel"]}
GEMMA: dict[str, Any] = {
    **SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "num_key_value_heads": 1,
    "use_bidirectional_attention": True,
}


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "encoders" / name / "config.json").read_text())
    return found


def test_modernbert_configs_of_before_and_after_transformers_5_mean_the_same() -> None:
    new = decoder_config(stored("modernbert_tiny"))
    old = {
        key: value for key, value in stored("modernbert_tiny").items() if key not in ("rope_parameters", "layer_types")
    }
    old |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3}
    assert decoder_config({**old, "position_embedding_type": "absolute", "reference_compile": None}) == new
    assert [layer.sliding_window for layer in new.layers] == [None, 7, 7, None]
    assert (new.rope_theta, new.sliding_rope_theta) == (160000.0, 10000.0)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen2", "Llama", "Gemma3Text", "GPT2"])
def test_a_decoder_saved_with_a_head_for_scores_is_that_decoder(name: str) -> None:
    hf = {"architectures": [f"{name}ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    read = text_config(hf, families())
    assert read["architectures"][0] in (f"{name.removesuffix('Text')}ForCausalLM", "GPT2LMHeadModel")
    assert only_embeds(read)


def test_a_head_for_labels_reads_the_last_token() -> None:
    hf = {**SIZES, "num_key_value_heads": 1, "architectures": ["LlamaForSequenceClassification"]}
    head = decoder_config(text_config({**hf, "num_labels": 1}, families())).head
    assert head == EmbeddingHead((HeadLayer("score", 48, 1, has_bias=False),), "last", ("LABEL_0",), "sigmoid")
    head = decoder_config(text_config({**hf, "id2label": {"1": "no", "0": "yes"}}, families())).head
    assert head == EmbeddingHead((HeadLayer("score", 48, 2, has_bias=False),), "last", ("yes", "no"), "softmax")


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_decoders_whose_config_says_that_they_are_not_causal_attend_in_both_directions(name: str) -> None:
    hf = {**SIZES, "architectures": [f"{name}ForCausalLM"], "num_key_value_heads": 1, "sliding_window": None}
    assert decoder_config({**hf, "is_causal": False}).is_bidirectional
    assert not decoder_config({**hf, "is_causal": True}).is_bidirectional
    assert not decoder_config(hf).is_bidirectional


def test_the_bidirectional_llama_is_not_causal_and_averages() -> None:
    hf = {**SIZES, "architectures": ["LlamaBidirectionalModel"], "num_key_value_heads": 1, "pooling": "avg"}
    assert decoder_config(hf).is_bidirectional
    with pytest.raises(CheckpointError, match="pooling is 'last'; supported: 'avg' or null"):
        decoder_config({**hf, "pooling": "last"})


def test_windows_of_gemma_are_halved_only_if_its_tokens_attend_in_both_directions() -> None:
    both = decoder_config({**GEMMA, "sliding_window": 512})
    one = decoder_config({**GEMMA, "sliding_window": 512, "use_bidirectional_attention": False})
    assert (both.layers[0].sliding_window, both.is_bidirectional) == (257, True)
    assert (one.layers[0].sliding_window, one.is_bidirectional) == (512, False)
    assert only_embeds({**GEMMA, "sliding_window": 512})
    assert not only_embeds({**GEMMA, "use_bidirectional_attention": None})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling is {'rope_type': 'yarn', 'factor': 2.0}",
        ),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"local_attention": 0}, "local_attention is 0"),
        ({"hidden_activation": "tanh"}, "hidden_activation is 'tanh'"),
        (
            {"architectures": ["ModernBertForSequenceClassification"], "num_labels": 1, "classifier_pooling": "max"},
            "classifier_pooling is 'max'; supported: cls or mean",
        ),
        (
            {"architectures": ["ModernBertForSequenceClassification"], "num_labels": 0},
            "num_labels is 0; supported: an integer from 1",
        ),
        ({"global_rope_theta": 0}, "global_rope_theta is 0"),
    ],
)
def test_unsupported_values_are_rejected(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        decoder_config({**MODERNBERT, **keys})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
