"""A drafter of Gemma 4 changes no token, and its drafts are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.certain_assistant import RING, Source, certain_assistant
from tests.models.goldens import AssistantGolden, assistant_golden

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("speculates")]  # real models
NUM_DRAFTS = 3


@pytest.fixture(
    scope="module",
    params=[
        ("gemma4_tiny", {"cpu_kernels": "native"}),
        pytest.param(("gemma4_moe_odd_tiny", {}), marks=pytest.mark.exhaustive),
        pytest.param(("gemma4_unified_tiny", {"cpu_kernels": "xla"}), marks=pytest.mark.exhaustive),
        pytest.param(("gemma4_unified_tiny", {"tensor_parallel_size": 2}), marks=pytest.mark.exhaustive),
        pytest.param(("gemma4_tiny", {"data_parallel_size": 2}), marks=pytest.mark.exhaustive),
        pytest.param(("gemma4_tiny", {"kv_cache_dtype": "fp8"}), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def served(request: Any) -> Iterator[tuple[AssistantGolden, ModelEngine]]:
    """Clusters of tokens with native kernels, odd sizes, logits of all tokens, and two devices of both kinds."""
    name, options = request.param
    golden = assistant_golden(name)
    engine = ModelEngine(golden.target, draft_model=golden.path, num_speculative_tokens=NUM_DRAFTS, **options)
    yield golden, engine
    engine.close()


def test_tokens_and_log_probabilities_are_those_without_a_drafter(served: tuple[AssistantGolden, ModelEngine]) -> None:
    _, engine = served
    check_drafts_change_nothing(engine, NUM_DRAFTS, num_cached=32 if engine.kv.pool.num_ranks == 1 else 0)
    assert engine.executor.compilations()["serving"] == 0


def drafted(
    engine: ModelEngine, golden: AssistantGolden, num_outputs: int, others: list[AddRequest]
) -> list[list[int]]:
    """Return the drafts on the device after the first outputs of `golden`, whose request ran beside others."""
    state = engine.executor._runner._state
    assert state.arrays.drafts is not None
    empty = jax.device_put(np.zeros(state.arrays.drafts.shape, np.int32), state.arrays.drafts.sharding)
    state.arrays = state.arrays._replace(drafts=empty)
    found = engine.run([request("golden", golden.prompt_ids, max_tokens=num_outputs), *others])
    assert found["golden"].token_ids == golden.output_ids[:num_outputs].tolist()
    assert state.arrays.drafts is not None
    position = len(golden.prompt_ids) + num_outputs - 1
    return [row[1:].tolist() for row in np.asarray(state.arrays.drafts) if row[0] == position]


def test_drafts_are_those_of_transformers(served: tuple[AssistantGolden, ModelEngine]) -> None:
    """For a prompt in one chunk or several, found in the prefix cache, computed again after a preemption, and beside others."""
    golden, engine = served
    if engine.config.cache.kv_cache_dtype == "fp8":
        pytest.skip("rounded keys make other drafts")
    for options in ({}, {"max_num_batched_tokens": 7}, {"overlap": False}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for others in ([], [], [request("other", range(60, 63), max_tokens=4)]):
            for index, expected in enumerate(golden.draft_ids.tolist()):
                assert expected in drafted(engine, golden, 2 + index, others), (options, others, index)
    engine.restart(num_blocks=7 * engine.kv.pool.num_ranks, num_speculative_tokens=NUM_DRAFTS)
    grows = [request("grows", range(70, 90), max_tokens=40)]
    assert golden.draft_ids[0].tolist() in drafted(engine, golden, 2, grows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["token", "hidden"])
def test_a_drafter_that_must_be_right_has_every_draft_accepted(source: Source, tmp_path: Path) -> None:
    """From the embedding of the newest token, and from the hidden state of the one before it, also after several accepted ones."""
    target, drafter = certain_assistant(tmp_path, source)
    engine = ModelEngine(target, draft_model=drafter, num_speculative_tokens=NUM_DRAFTS)
    prompts = [list(np.resize(np.roll(RING, -i), 37)) for i in range(2)]
    for options in ({}, {"overlap": False}, {"max_num_batched_tokens": 7}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for _ in range(2):  # the second time, the prompt is found in the prefix cache
            found = engine.run([request(str(i), prompt, max_tokens=41) for i, prompt in enumerate(prompts)])
            for i, result in enumerate(found.values()):
                assert result.token_ids == list(np.resize(np.roll(RING, -i - 37), 41))
        assert engine.num_accepted_tokens == engine.num_draft_tokens > 100
    engine.close()


@pytest.mark.exhaustive
def test_sleep_and_new_weights_keep_the_drafter() -> None:
    golden = assistant_golden("gemma4_tiny")
    engine = ModelEngine(golden.target, draft_model=golden.path, num_speculative_tokens=NUM_DRAFTS)
    weights = engine.executor.weights
    assert weights is not None
    for keeps_copy in (True, False):
        weights.discard(keeps_copy=keeps_copy)
        weights.restore()()
        weights.load(str(golden.target))()
        engine.restart(num_speculative_tokens=NUM_DRAFTS)
        assert golden.draft_ids[0].tolist() in drafted(engine, golden, 2, [])
    engine.close()
