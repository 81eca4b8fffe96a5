"""`examples/rl` on a tiny model: the trainer computes what the server sampled, with the weights that it gave it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxserve_kernels import native

from jaxserve import LLM, SamplingParams
from jaxserve.frontend.frontend import Frontend
from tests.e2e.http_server import ROOT
from tests.e2e.real_server import model

pytestmark = [pytest.mark.slow]
STEPS = 3
NUM_NEW = 8


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "rl"))
    return importlib.import_module("reinforce")


@pytest.fixture(params=[pytest.param("xla", marks=pytest.mark.exhaustive), "native"])
def llm(programs: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    if request.param == "native" and native.register() is None:
        pytest.skip("the native kernels are not built")
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "cpu_kernels": request.param, "quantization": "none"}
    limits["deterministic"] = request.param == "native"
    with LLM(model().path, compile_cache=str(programs), dtype="float32", **limits) as llm:
        yield llm


def compilations(llm: LLM) -> float:
    async def ask(frontend: Frontend) -> float:
        return frontend.metrics.value("compilations", phase="serving")

    return llm._engine.call(ask)


def test_each_step_samples_with_the_weights_that_the_trainer_just_made(
    example: Any, llm: LLM, request: pytest.FixtureRequest
) -> None:
    """With native kernels trainer and server compute the same bits."""
    largest = 0 if "native" in request.node.name else 2e-4
    first, policy = (example.Policy(model().path, learning_rate=0.02) for _ in range(2))
    records = list(example.train(llm, policy, steps=STEPS, num_replies=4, num_new=NUM_NEW))
    assert [record["sampled_by_versions"] for record in records] == [[step] for step in range(STEPS)]
    assert [record["new_version"] for record in records] == [step + 1 for step in range(STEPS)]
    assert max(record["divergence_max"] for record in records) <= largest
    assert compilations(llm) == 0
    params = SamplingParams(n=4, max_tokens=NUM_NEW, temperature=1.0, seed=7, logprobs=0)
    prompts, replies, scores, *_ = zip(
        *example.sampled(llm.generate(example.PROMPTS, params, progress_bar=False)), strict=True
    )
    rollouts = example.packed(prompts, replies, NUM_NEW)
    served = np.array([score for reply in scores for score in reply])

    def own(trainer: Any) -> np.ndarray:
        rows = zip(np.asarray(trainer.logprobs(rollouts)), scores, strict=True)
        return np.concatenate([row[: len(reply)] for row, reply in rows])

    np.testing.assert_allclose(own(policy), served, atol=largest, rtol=0)
    assert np.abs(own(first) - served).max() > 0.05, "the weights were meant to change"
    replayed = llm.replay(prompts, replies, progress_bar=False)
    np.testing.assert_allclose([score for reply in replayed for score in reply], served, atol=largest, rtol=0)


def test_rewards_and_advantages_are_those_of_the_definition(example: Any) -> None:
    assert example.reward_of("Eel") == pytest.approx(2 / 3)
    assert example.reward_of("") == 0
    found = example.advantages_of(np.array([[0.0, 1.0], [0.5, 0.5]]))
    np.testing.assert_allclose(found, [[-1, 1], [0, 0]], atol=1e-5)
