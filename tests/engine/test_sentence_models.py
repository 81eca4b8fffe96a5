"""Models as sentence-transformers saves them give its vectors, and those of cross-encoders its scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.sentence.modules import SentenceModules
from jaxserve.config import CompileConfig, Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.embedding import make_embedding_skeleton, read_modules
from jaxserve.executor.preparation import resolve_task
from jaxserve.frontend.embedding import activated, finished
from jaxserve.models.registry import model_of, open_model
from jaxserve.runner.backend import Chip
from jaxserve.runner.determinism import check_deterministic
from jaxserve.tokenizer.score_prompts import encode_score_pairs
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.engine.embedding_engine import EmbeddingEngine
from tests.models.goldens import (
    DATA,
    encoder_golden,
    label_golden,
    pair_golden,
    pair_goldens,
    sentence_golden,
    sentence_goldens,
)

TOLERANCE = 1e-4
QUICK = ("embedding_gemma_tiny", "mpnet_tiny")
SENTENCES = ("the quick fox", "a server answers", "lists of tokens, many at once")
LABELS = {
    "modernbert_labels_tiny": (("LABEL_0", "LABEL_1"), "softmax"),
    "qwen3_labels_tiny": (("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3", "LABEL_4"), "softmax"),
    "roberta_topics_tiny": (("sports", "weather", "music"), "sigmoid"),
}
"""Labels and activation of each classifier."""


def vectors(path: Path, texts: list[np.ndarray], **settings: Any) -> np.ndarray:
    """Return the vectors of texts that share steps, as a client gets them."""
    engine = EmbeddingEngine(path, max_num_batched_tokens=96, **settings)
    try:
        info = engine.model_info.embedding
        assert info is not None
        found = finished(engine.vectors(texts), normalizes=info.normalizes)
        assert found.shape[1] == info.size
        assert engine.executor.compilations()["serving"] == 0
        return found
    finally:
        engine.close()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sentence_goldens()]
)
def test_vectors_are_those_of_sentence_transformers(name: str) -> None:
    golden = sentence_golden(name)
    np.testing.assert_allclose(vectors(golden.path, golden.token_ids), golden.vectors, atol=TOLERANCE)


def scores(engine: EmbeddingEngine, texts: list[Any]) -> np.ndarray:
    """Return the scores of texts, as a client gets them."""
    info = engine.model_info.embedding
    assert info is not None and info.scores_pairs
    return activated(engine.vectors(texts), info.activation)[:, 0]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in pair_goldens()]
)
def test_scores_are_those_of_transformers(name: str) -> None:
    """The score ends in a sigmoid, as sentence-transformers applies it to one label."""
    golden = pair_golden(name)
    engine = EmbeddingEngine(golden.path, max_num_batched_tokens=96)
    found = scores(engine, golden.token_ids)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-golden.scores)), atol=TOLERANCE)
    engine.close()


@pytest.mark.parametrize(
    "name",
    [name if name == "modernbert_labels_tiny" else pytest.param(name, marks=pytest.mark.slow) for name in LABELS],
)
def test_probabilities_of_labels_are_those_of_transformers(name: str) -> None:
    golden = label_golden(name)
    engine = EmbeddingEngine(golden.path, max_num_batched_tokens=96)
    info = engine.model_info.embedding
    assert info is not None and (info.labels, info.activation) == LABELS[name]
    np.testing.assert_allclose(np.stack(engine.vectors(golden.token_ids)), golden.logits, atol=TOLERANCE)
    tokenizer = load_tokenizer(golden.path)
    found = activated(engine.vectors([tokenizer.encode(text) for text in SENTENCES]), info.activation)
    np.testing.assert_allclose(found, golden.probabilities, atol=TOLERANCE)
    engine.close()


@pytest.mark.parametrize(
    ("tokens", "sign"), [("no,yes", 1), pytest.param("yes, no", -1, marks=pytest.mark.slow)], ids=["yes", "no"]
)
def test_a_decoder_scores_texts_with_the_logits_of_tokens_that_a_setting_names(
    tmp_path: Path, tokens: str, sign: int
) -> None:
    golden = pair_golden("qwen3_reranker_tiny")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(golden.path / name)
    engine = EmbeddingEngine(tmp_path, max_num_batched_tokens=96, classifier_from_token=tokens)
    found = scores(engine, golden.token_ids)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-sign * golden.scores)), atol=TOLERANCE)
    pairs = [("the quick fox", "jumps over"), ("a server", "answers many requests at once")]
    prompts = [ids for ids, _ in encode_score_pairs(load_tokenizer(golden.path), pairs, None)]
    of_texts = np.load(golden.path / "golden.npz")["of_texts"]
    found = scores(engine, prompts)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-sign * of_texts)), atol=TOLERANCE)
    engine.close()


def test_tokens_that_cannot_score_are_rejected(tmp_path: Path) -> None:
    path = DATA / "encoders" / "qwen3_reranker_tiny"
    config = ModelConfig(model="any", classifier_from_token="no,maybe")
    with pytest.raises(ConfigError, match="--classifier-from-token: 'maybe' is no token of"):
        read_modules(config, path)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        read_modules(config, tmp_path)
    with pytest.raises(ConfigError, match="expected one token, or two"):
        ModelConfig(model="any", classifier_from_token="a,b,c")
    with pytest.raises(ConfigError, match="--classifier-from-token no: not with --task generate"):
        ModelConfig(model="any", classifier_from_token="no", task="generate")
    encoder = model_of(open_model(DATA / "encoders" / "modernbert_tiny"))
    tokens = SentenceModules(None, False, None, logit_tokens=(5, 6))
    with pytest.raises(ConfigError, match="scores from the logits of tokens: an encoder has none"):
        make_embedding_skeleton(Config(model=config), encoder, Chip("cpu", None), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedding_gemma_odd_tiny", "eurobert_tiny", "mpnet_tiny"])
def test_two_devices_make_the_same_vectors(name: str) -> None:
    golden = sentence_golden(name)
    found = vectors(golden.path, golden.token_ids, tensor_parallel_size=2)
    np.testing.assert_allclose(found, golden.vectors, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", sentence_goldens())
def test_native_kernels_make_the_same_vectors(name: str) -> None:
    golden = sentence_golden(name)
    found = vectors(golden.path, golden.token_ids, cpu_kernels="auto")
    np.testing.assert_allclose(found, golden.vectors, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert_tiny", "embedding_gemma_tiny", "qwen3_scores_tiny"])
def test_deterministic_is_for_models_that_generate(name: str) -> None:
    model = model_of(open_model(DATA / "encoders" / name))
    config = Config(model=ModelConfig(model="any"), compile=CompileConfig(deterministic=True))
    with pytest.raises(ConfigError, match="--deterministic: only"):  # with native kernels, or for models that generate
        check_deterministic(config, make_embedding_skeleton(config, model, Chip("cpu", None)))


@pytest.mark.slow
def test_an_encoder_saved_with_a_head_for_tokens_makes_the_same_vectors(tmp_path: Path) -> None:
    golden = encoder_golden("roberta_tiny")
    tensors = {f"roberta.{name}": tensor for name, tensor in load_file(golden.path / "model.safetensors").items()}
    save_file(tensors | {"lm_head.bias": np.ones(280, np.float32)}, tmp_path / "model.safetensors")
    config = json.loads((golden.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["RobertaForMaskedLM"]}))
    expected = finished([hidden.mean(0) for hidden in golden.hidden], normalizes=True)
    np.testing.assert_allclose(vectors(tmp_path, golden.token_ids), expected, atol=TOLERANCE)


@pytest.mark.slow
def test_the_text_part_of_a_multimodal_model_embeds(tmp_path: Path) -> None:
    golden = sentence_golden("embedding_gemma2_tiny")
    tensors = load_file(golden.path / "model.safetensors")
    others = ("vision_tower.encoder.norm.weight", "embed_vision.embedding_projection.weight", "audio_tower.norm.weight")
    whole = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(whole | {name: np.ones((2, 2), np.float32) for name in others}, tmp_path / "model.safetensors")
    text = json.loads((golden.path / "config.json").read_text())
    config = {"architectures": ["EmbeddingGemma2Model"], "text_config": text, "vision_config": {}, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = vectors(tmp_path, golden.token_ids)  # averaged and normalised without modules.json, too
    np.testing.assert_allclose(found, golden.vectors, atol=TOLERANCE)


def test_a_model_whose_tokens_attend_in_both_directions_embeds_and_generates_nothing() -> None:
    model = model_of(open_model(DATA / "encoders" / "embedding_gemma_tiny"))
    assert resolve_task(ModelConfig(model="any"), model) == "embed"
    with pytest.raises(ConfigError, match="--task generate: this model is an encoder, or scores texts"):
        resolve_task(ModelConfig(model="any", task="generate"), model)
