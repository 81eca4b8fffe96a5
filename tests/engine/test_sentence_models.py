"""Models as sentence-transformers saves them give its vectors, and those of cross-encoders its scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.executor.preparation import resolve_task
from jaxserve.frontend.embedding import finished
from jaxserve.models.registry import model_of, open_model
from tests.engine.embedding_engine import EmbeddingEngine
from tests.models.goldens import DATA, pair_golden, pair_goldens, sentence_golden, sentence_goldens

TOLERANCE = 1e-4
QUICK = ("embedding_gemma_tiny",)


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


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in pair_goldens()]
)
def test_scores_are_those_of_transformers(name: str) -> None:
    """The score ends in a sigmoid, as sentence-transformers applies it to one label."""
    golden = pair_golden(name)
    engine = EmbeddingEngine(golden.path, max_num_batched_tokens=96)
    assert engine.model_info.embedding is not None and engine.model_info.embedding.scores_pairs
    found = np.concatenate(engine.vectors(golden.token_ids))
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-golden.scores)), atol=TOLERANCE)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedding_gemma_odd_tiny", "modernbert_odd_tiny"])
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


def test_a_model_whose_tokens_attend_in_both_directions_embeds_and_generates_nothing() -> None:
    model = model_of(open_model(DATA / "encoders" / "embedding_gemma_tiny"))
    assert resolve_task(ModelConfig(model="any"), model) == "embed"
    with pytest.raises(ConfigError, match="--task generate: this model is an encoder"):
        resolve_task(ModelConfig(model="any", task="generate"), model)
