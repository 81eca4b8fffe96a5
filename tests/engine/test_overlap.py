"""Overlap and multi-step decode on a real (tiny) model change no token."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.ipc.messages import Abort, AddRequest
from tests.engine.model_engine import Generated, ModelEngine, request

WAYS = [(False, 0.0), (True, 0.0), (False, 1e6), (True, 1e6)]
"""(overlap, milliseconds of a multi-step call)"""


pytestmark = pytest.mark.slow  # a real model; the fast tests show the same on the fake one


def mix(engine: ModelEngine) -> list[AddRequest]:
    """Greedy and seeded, ends by EOS, stop ids and length, prompts in chunks, a shared prefix, log-probabilities."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 300, 40)
    options: list[dict[str, object]] = [
        {"max_tokens": 40},
        {"temperature": 1.0, "seed": 11, "max_tokens": 33, "num_top_logprobs": 0},
        {"temperature": 1.3, "seed": 12, "max_tokens": 50, "top_k": 30, "ignore_eos": False},
        {"temperature": 1.0, "seed": 13, "max_tokens": 1},
        {"temperature": 1.5, "seed": 14, "max_tokens": 45, "top_p": 0.95},
        {"max_tokens": 12, "num_top_logprobs": 3},
    ]
    items = [request(str(i), rng.integers(3, 300, rng.integers(1, 60)), **options[i % len(options)]) for i in range(12)]
    items += [request(f"shared {i}", [*shared, i + 3], max_tokens=20) for i in range(3)]
    engine.restart(overlap=False, max_burst_ms=0.0)
    tokens = engine.run(items[4:5])["4"].token_ids
    stop_at = next(token for i, token in enumerate(tokens[10:], 10) if token not in tokens[:i])
    items.append(request("stops", items[4].prompt_token_ids, **options[4], stop_token_ids=(stop_at,)))
    return items


def shown(results: dict[str, Generated]) -> dict[str, tuple[list[int], str | None]]:
    return {name: (result.token_ids, result.finish_reason) for name, result in results.items()}


@pytest.mark.parametrize("num_blocks", [None, 20])
def test_tokens_are_the_same_however_steps_overlap(engine: ModelEngine, num_blocks: int | None) -> None:
    items, before = mix(engine), engine.executor.compilations()
    found = []
    for overlap, max_burst_ms in WAYS:
        engine.restart(num_blocks, overlap=overlap, max_burst_ms=max_burst_ms)
        results = engine.run(items)
        found.append(shown(results))
        assert (engine.num_calls < engine.num_steps) == (max_burst_ms > 0)
        assert (engine.num_preemptions > 0) == (num_blocks is not None)
        assert [len(result.logprobs) for result in results.values() if result.logprobs] == [
            len(results[item.request_id].token_ids) for item in items if item.sampling.num_top_logprobs is not None
        ]
        assert engine.kv.usage == 0.0
    assert found[0]["stops"][1] == "stop"
    assert 10 < len(found[0]["stops"][0]) < 45
    for (overlap, max_burst_ms), other in zip(WAYS[1:], found[1:], strict=True):
        assert other == found[0], (overlap, max_burst_ms)
    assert engine.executor.compilations() == before


@pytest.mark.versions
def test_drafts_change_neither_tokens_nor_their_log_probabilities(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, with stop ids, four at a time. Drafts are the right tokens, with a wrong one now and then."""
    items = mix(engine)
    engine.restart(overlap=False, max_burst_ms=0.0)
    plain = engine.run(items)
    texts = [np.array([*item.prompt_token_ids, *plain[item.request_id].token_ids]) for item in items]

    def nearly_right(tokens: np.ndarray, count: int, shortest: int) -> np.ndarray:
        text = next(text for text in texts if len(text) > len(tokens) and (text[: len(tokens)] == tokens).all())
        draft = text[len(tokens) : len(tokens) + count]
        return np.where((len(tokens) + np.arange(len(draft))) % 7 == 0, 3, draft)

    monkeypatch.setattr("jaxserve.scheduler.prompt_lookup.continuation", nearly_right)
    engine.restart(num_speculative_tokens=6)
    drafted = {name: result for i in range(0, len(items), 4) for name, result in engine.run(items[i : i + 4]).items()}
    assert shown(drafted) == shown(plain)
    num_tokens = sum(len(result.token_ids) for result in plain.values())
    assert engine.num_accepted_tokens > num_tokens / 3
    assert engine.kv.usage == 0.0
    for name, result in plain.items():
        for one, other in zip(result.logprobs, drafted[name].logprobs, strict=True):
            assert one.top_token_ids == other.top_token_ids
            assert [one.logprob, *one.top_logprobs] == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-4)


def test_logprobs_of_multi_step_decode_are_those_of_single_steps(engine: ModelEngine) -> None:
    item = request("a", [5, 6, 7], max_tokens=30, num_top_logprobs=0, temperature=1.0, seed=3)
    engine.restart(overlap=False, max_burst_ms=0.0)
    single = engine.run([item])["a"]
    engine.restart(max_burst_ms=1e6)
    several = engine.run([item])["a"]
    assert engine.num_calls < engine.num_steps / 2
    assert [entry.logprob for entry in several.logprobs] == pytest.approx(
        [e.logprob for e in single.logprobs], abs=1e-5
    )


def test_row_that_ended_unread_writes_and_samples_nothing(engine: ModelEngine) -> None:
    """The page of the overrun row stays as it was: the next owner of its tokens gets them from the cache."""
    item = request("a", np.arange(5, 36), max_tokens=40)
    engine.restart(overlap=False, max_burst_ms=0.0)
    tokens = engine.run([item])["a"].token_ids
    stop_at = tokens[1]
    first_end = tokens.index(stop_at) + 1
    engine.restart(max_burst_ms=0.0)
    assert (
        engine.run([request("a", np.arange(5, 36), max_tokens=40, stop_token_ids=(stop_at,))])["a"].token_ids
        == (tokens[:first_end])
    )
    again = engine.run([request("b", [*range(5, 36), *tokens[:first_end]], max_tokens=40 - first_end)])["b"]
    assert again.num_cached_tokens >= 32
    assert again.token_ids == tokens[first_end:]


@pytest.mark.parametrize("max_burst_ms", [0.0, 1e6])
def test_abort_in_flight_leaves_the_others_alone(engine: ModelEngine, max_burst_ms: float) -> None:
    items = [request(str(i), np.arange(5 + i, 20 + i), max_tokens=30, temperature=1.0, seed=i) for i in range(4)]
    engine.restart(overlap=False, max_burst_ms=0.0)
    expected = shown(engine.run(items))
    engine.restart(max_burst_ms=max_burst_ms)
    for item in items:
        assert engine.core.handle(item) == []
    tokens: dict[str, list[int]] = {item.request_id: [] for item in items}
    while engine.core.has_work:
        if len(tokens["1"]) >= 3 and (ends := engine.core.handle(Abort([items[1].request_id]))):
            assert [end.finish_reason for end in ends] == ["abort"]
        step = engine.core.step()
        for output in [] if step is None else step.outputs:
            tokens[output.request_id] += output.token_ids
    aborted = tokens.pop("1")
    assert 3 <= len(aborted) < 30
    assert aborted == expected.pop("1")[0][: len(aborted)]
    assert tokens == {name: result[0] for name, result in expected.items()}
    assert engine.kv.usage == 0.0
