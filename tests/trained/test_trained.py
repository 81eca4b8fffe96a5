"""Models trained for a minute on this project's text: their states, experts and near ties are those of a model that works.

Random weights make every token a surprise, and a state that is lost or mixed up hardly moves their logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.models.tiny_model import NUM_LOGITS, TinyModel
from tests.trained.forward import SmallModel, Weights
from tests.trained.training import MODELS, own_text, train, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.optimized, pytest.mark.exhaustive]

STEPS = 50
PROMPT = 40
MARGIN = 0.25
"""Nats below the entropy of single tokens. The text is the project's own, and changes with it; the mixture ends about 0.5 below."""
TIE = 2e-4
"""Logits that are closer may change places: the two computations round differently."""


@dataclass(frozen=True)
class Trained:
    model: SmallModel
    weights: Weights
    losses: list[float]
    tokens: np.ndarray
    """The training text, int32 (N)."""
    path: Path

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each token of a text by the plain forward function, (S, V)."""
        return np.asarray(jax.jit(self.model.logits)(self.weights, jnp.asarray([tokens]))[0])

    def text(self, number: int, length: int) -> list[int]:
        start = 1000 + 997 * number
        return [int(token) for token in self.tokens[start : start + length]]


@pytest.fixture(scope="module", params=list(MODELS))
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    model, tokens = MODELS[request.param], own_text()
    steps = list(train(model, tokens, steps=STEPS))
    path = tmp_path_factory.mktemp(model.name)
    write_checkpoint(model, steps[-1].weights, path)
    return Trained(model, steps[-1].weights, [step.loss for step in steps], tokens, path)


@pytest.fixture(scope="module")
def engine(trained: Trained) -> Iterator[ModelEngine]:
    made = ModelEngine(trained.path, has_all_buckets=True)
    yield made
    made.close()


def test_the_model_has_learnt_more_than_which_tokens_are_frequent(trained: Trained) -> None:
    counts = np.bincount(trained.tokens) / len(trained.tokens)
    entropy = -(counts[counts > 0] * np.log(counts[counts > 0])).sum()
    assert np.mean(trained.losses[-10:]) < entropy - MARGIN


def test_tokens_and_logprobs_are_those_of_the_plain_forward(trained: Trained, engine: ModelEngine) -> None:
    prompts = [trained.text(number, PROMPT) for number in range(4)]
    engine.restart()
    found = engine.run([request(str(i), each, max_tokens=64, num_top_logprobs=1) for i, each in enumerate(prompts)])
    for name, prompt in enumerate(prompts):
        reply = found[str(name)]
        logits = trained.logits([*prompt, *reply.token_ids])[PROMPT - 1 : -1]
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        chosen = np.take_along_axis(logprobs, np.array(reply.token_ids)[:, None], 1)[:, 0]
        assert (logprobs.max(1) - chosen < TIE).all()
        assert np.abs([each.logprob for each in reply.logprobs] - chosen).max() < 1e-3


def test_chunks_neighbours_preemption_and_hits_change_no_token(trained: Trained, engine: ModelEngine) -> None:
    stem = trained.text(9, 70)
    messages = [request(str(i), [*stem, *trained.text(i, 9 + i)], max_tokens=20) for i in range(3)]
    alone = []
    for message in messages:
        engine.restart()
        alone.append(engine.run([message])[message.request_id].token_ids)
    for options in ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 16}, {"overlap": False}):
        engine.restart(**options)
        together = engine.run(messages)
        assert [together[each.request_id].token_ids for each in messages] == alone, options
    engine.restart()
    hits = [engine.run([message])[message.request_id] for message in messages]
    assert [hit.token_ids for hit in hits] == alone
    assert hits[2].num_cached_tokens >= 64


def test_bfloat16_hardly_moves_the_distribution(trained: Trained) -> None:
    """The bound is the mean KL divergence in nats per token."""
    made, found = TinyModel(trained.path, dtype="bfloat16"), []
    for number in range(6):
        text = trained.text(number, 96)
        made.restart()
        ours = np.asarray(jax.nn.log_softmax(made.logits(np.array(text))))
        plain = np.asarray(jax.nn.log_softmax(trained.logits(text)[-NUM_LOGITS:]))
        found.append((np.exp(plain) * (plain - ours)).sum(1).mean())
    assert np.mean(found) < 2e-3
