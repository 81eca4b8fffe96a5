"""An EAGLE-3 head changes no token, and its drafts are those of the head in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.engine.image_reader import Reader, limits
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_image_speculation import check_tokens
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.certain_predictor import RING, certain_predictor
from tests.models.eagle_head import NumpyHead, write_certain_head, write_head
from tests.models.eagle_pair import EaglePair
from tests.models.goldens import DATA, golden_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("speculates")]  # real models
NUM_DRAFTS = 3


@dataclass
class Served:
    """An engine with a head."""

    target: Path
    head: Path
    engine: ModelEngine


def served_with(folder: Path, name: str, **options: Any) -> Served:
    target = golden_checkpoint(name).path
    head = write_head(folder / "head", target, "speculators", norm_before_residual=True)
    engine = ModelEngine(target, draft_model=head, num_speculative_tokens=NUM_DRAFTS, **options)
    return Served(target, head, engine)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_tiny", {"cpu_kernels": "native"}),
        pytest.param(("lfm2_tiny", {}), marks=pytest.mark.exhaustive),
        pytest.param(("qwen3_tiny", {"tensor_parallel_size": 2}), marks=pytest.mark.exhaustive),
        pytest.param(("qwen3_tiny", {"data_parallel_size": 2}), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Plain attention with native kernels, recurrent states, and two devices of both kinds."""
    name, options = request.param
    found = served_with(tmp_path_factory.mktemp("eagle"), name, **options)
    yield found
    found.engine.close()


def test_tokens_and_log_probabilities_are_those_without_a_head(served: Served) -> None:
    engine = served.engine
    is_cached = not engine.executor.model_info.num_state_slots and engine.kv.pool.num_ranks == 1
    check_drafts_change_nothing(engine, NUM_DRAFTS, num_cached=32 if is_cached else 0)
    assert engine.executor.compilations()["serving"] == 0


def numpy_drafts(served: Served, known: list[int]) -> tuple[list[int], list[np.ndarray]]:
    """Return the drafts after a text, and the logits that they are chosen by."""
    pair, head = EaglePair(served.target, served.head), NumpyHead(served.head)
    hidden = head.start(pair.run(np.array(known[:-1]))[1])
    embeddings = pair.embed(np.array(known[1:]))
    tokens, all_logits = [], []
    for _ in range(NUM_DRAFTS):
        made = head(embeddings, hidden)[-1:]
        all_logits.append(head.logits(made)[0])
        tokens.append(int(all_logits[-1].argmax()))
        hidden = np.concatenate([hidden, made])
        embeddings = np.concatenate([embeddings, pair.embed(np.array(tokens[-1:]))])
    return tokens, all_logits


def test_drafts_are_those_of_the_head_in_numpy(served: Served) -> None:
    """For a prompt in one chunk or several, found in the prefix cache, and beside others."""
    engine, prompt = served.engine, list(range(20, 60))
    message = request("a", prompt, max_tokens=2)
    engine.restart()
    outputs = engine.run([message])["a"].token_ids
    expected, logits = numpy_drafts(served, prompt + outputs)
    best = np.sort(np.stack(logits))[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 1e-3, "no two tokens are as good as equal"
    state = engine.executor._runner._state
    for options in ({}, {"max_num_batched_tokens": 7}, {"overlap": False}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for others in ([], [], [request("other", range(60, 63), max_tokens=4)]):
            assert state.arrays.drafts is not None
            empty = jax.device_put(np.zeros(state.arrays.drafts.shape, np.int32), state.arrays.drafts.sharding)
            state.arrays = state.arrays._replace(drafts=empty)
            assert engine.run([message, *others])["a"].token_ids == outputs
            assert state.arrays.drafts is not None
            rows = [row[1:].tolist() for row in np.asarray(state.arrays.drafts) if row[0] == len(prompt) + 1]
            assert expected in rows, (options, others)


@pytest.mark.exhaustive
def test_a_head_that_must_be_right_has_every_draft_accepted(tmp_path: Path) -> None:
    """Its drafts are tokens of its own vocabulary, and it continues from its own output."""
    target = certain_predictor(tmp_path / "model", "token")
    head = write_certain_head(tmp_path / "head", target)
    engine = ModelEngine(target, draft_model=head, num_speculative_tokens=NUM_DRAFTS)
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
def test_a_head_of_a_model_that_reads_images_changes_no_token(tmp_path: Path) -> None:
    """It takes tokens of images for text."""
    name = "qwen3_vl_tiny"
    target = DATA / "vision" / name
    head = write_head(tmp_path / "head", target)
    engine = ModelEngine(target, draft_model=head, num_speculative_tokens=NUM_DRAFTS, **limits(name))
    check_tokens(Reader(engine, name))
    engine.close()


@pytest.mark.exhaustive
def test_sleep_and_new_weights_keep_the_head(tmp_path: Path) -> None:
    found = served_with(tmp_path, "qwen3_tiny")
    weights, engine, message = found.engine.executor.weights, found.engine, request("a", list(range(20, 50)))
    assert weights is not None
    engine.restart()
    expected = engine.run([message])["a"].token_ids
    for keeps_copy in (True, False):
        weights.discard(keeps_copy=keeps_copy)
        weights.restore()()
        weights.load(str(found.target))()
        engine.restart(num_speculative_tokens=NUM_DRAFTS)
        assert engine.run([message])["a"].token_ids == expected
        assert engine.num_draft_tokens > 0
    engine.close()
