"""A DFlash drafter changes no token, and its drafts are those of the drafter in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.certain_predictor import RING, certain_predictor
from tests.models.dflash_drafter import BLOCK_SIZE, WINDOW, NumpyDFlash, write_certain_dflash, write_dflash
from tests.models.dflash_pair import DFlashPair
from tests.models.goldens import golden_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("speculates")]  # real models
NUM_DRAFTS = BLOCK_SIZE - 1
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}


@dataclass
class Served:
    """An engine with a drafter."""

    target: Path
    drafter: Path
    engine: ModelEngine


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_tiny", {"cpu_kernels": "native"}),
        pytest.param(("qwen3_tiny", {"cpu_kernels": "xla"}), marks=pytest.mark.exhaustive),
        pytest.param(("lfm2_tiny", {}), marks=pytest.mark.exhaustive),
        pytest.param(("qwen3_tiny", {"tensor_parallel_size": 2}), marks=pytest.mark.exhaustive),
        pytest.param(("qwen3_tiny", {"data_parallel_size": 2}), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Native kernels, XLA's, recurrent states, and two devices of both kinds."""
    name, options = request.param
    target = golden_checkpoint(name).path
    drafter = write_dflash(tmp_path_factory.mktemp("dflash") / "drafter", target, **WINDOWS)
    engine = ModelEngine(target, draft_model=drafter, num_speculative_tokens=NUM_DRAFTS, **options)
    yield Served(target, drafter, engine)
    engine.close()


def test_tokens_and_log_probabilities_are_those_without_a_drafter(served: Served) -> None:
    engine = served.engine
    is_cached = not engine.executor.model_info.num_state_slots and engine.kv.pool.num_ranks == 1
    check_drafts_change_nothing(engine, NUM_DRAFTS, num_cached=32 if is_cached else 0)
    assert engine.executor.compilations()["serving"] == 0


def test_drafts_are_those_of_the_drafter_in_numpy(served: Served) -> None:
    """For a prompt in one chunk or several, found in the prefix cache, and beside others."""
    engine, prompt = served.engine, list(range(20, 60))
    message = request("a", prompt, max_tokens=9)
    engine.restart()
    outputs = engine.run([message])["a"].token_ids
    known = np.array(prompt + outputs[:2])
    logits = DFlashPair(served.target, served.drafter).numpy_logits(NumpyDFlash(served.drafter), known, NUM_DRAFTS)
    best = np.sort(logits)[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 1e-3, "no two tokens are as good as equal"
    state = engine.executor._runner._state
    message = request("a", prompt, max_tokens=2)  # the block is longer than what is missing
    for options in ({}, {"max_num_batched_tokens": 7}, {"overlap": False}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for others in ([], [], [request("other", range(60, 63), max_tokens=4)]):
            assert state.arrays.drafts is not None
            empty = jax.device_put(np.zeros(state.arrays.drafts.shape, np.int32), state.arrays.drafts.sharding)
            state.arrays = state.arrays._replace(drafts=empty)
            assert engine.run([message, *others])["a"].token_ids == outputs[:2]
            assert state.arrays.drafts is not None
            rows = [row[1:].tolist() for row in np.asarray(state.arrays.drafts) if row[0] == len(known) - 1]
            assert logits.argmax(-1).tolist() in rows, (options, others)


def test_a_drafter_that_must_be_right_has_every_draft_accepted(tmp_path: Path) -> None:
    """It attends to tokens of more than a round before, which were parts of chunks, of cached pages and of earlier drafts."""
    target = certain_predictor(tmp_path / "model", "token")
    drafter = write_certain_dflash(tmp_path / "drafter", target)
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
