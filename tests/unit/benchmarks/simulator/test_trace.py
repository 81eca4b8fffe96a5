"""Traces: seeded, of the stated distributions, with prompts that extend each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest

from benchmarks.simulator.device import REPLY_TOKEN
from benchmarks.simulator.trace import Conversation, Session, Turn, segment_tokens
from benchmarks.simulator.workloads import WORKLOADS, sessions


def trace(name: str, count: int = 300, *, seed: int = 0, cell: int = 0) -> list[Session]:
    endless = sessions(
        WORKLOADS[name], requests_per_s=100.0, num_requests=10**9, max_model_len=8192, seed=seed, cell=cell
    )
    return list(islice(endless, count))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_and_a_cell_determine_the_trace(name: str) -> None:
    first = trace(name, 20)
    assert first == trace(name, 20)
    assert first != trace(name, 20, seed=1)
    other = trace(name, 20, cell=1)
    assert not {session.key for session in first} & {session.key for session in other}
    lengths = {session.prefix: session.num_prefix_tokens for session in first}
    assert all(lengths.get(each.prefix, each.num_prefix_tokens) == each.num_prefix_tokens for each in other)


@pytest.mark.parametrize("name", WORKLOADS)
def test_sessions_arrive_in_order_and_fit_the_context(name: str) -> None:
    found = trace(name)
    assert all(one.arrival_s < other.arrival_s for one, other in pairwise(found))
    for session in found:
        num_tokens = sum(turn.num_new_tokens + turn.num_output_tokens for turn in session.turns)
        assert session.num_prefix_tokens + num_tokens <= 8192
        assert session.turns[0].wait_s == 0 < len(session.turns)


def test_turns_are_as_many_as_requests_are_wanted() -> None:
    found = sessions(WORKLOADS["agentic"], requests_per_s=10.0, num_requests=101, max_model_len=1 << 20, seed=0)
    assert sum(len(session.turns) for session in found) == 101


def test_waves_have_the_mean_rate_and_most_arrivals_in_their_high_phase() -> None:
    waves = WORKLOADS["bursts"].waves
    assert waves is not None
    assert waves.high_s * waves.high + waves.low_s * waves.low == pytest.approx(waves.high_s + waves.low_s)
    times_s = [session.arrival_s for session in trace("bursts", 6000)]
    later_s = [time_s for time_s in times_s if 30 <= time_s < 105]  # five periods, after the sessions of the start
    share = sum(waves.relative_rate(time_s) == waves.high for time_s in later_s) / len(later_s)
    assert share == pytest.approx(waves.high_s * waves.high / (waves.high_s + waves.low_s), abs=0.05)
    assert len(later_s) / 75 == pytest.approx(100 / WORKLOADS["bursts"].mean_turns, rel=0.1)


def test_requests_arrive_at_the_offered_rate_from_the_start() -> None:
    """Turns of a fleet that answers at once: the first seconds have as many as later ones."""
    turns_s = []
    for session in trace("sharegpt", 3000):
        time_s = session.arrival_s
        for turn in session.turns:
            time_s += turn.wait_s
            turns_s.append(time_s)
    for start_s in (0, 10, 20, 30):
        assert sum(start_s <= time_s < start_s + 10 for time_s in turns_s) == pytest.approx(1000, rel=0.1)


def test_a_prompt_continues_the_one_before_it_and_its_reply() -> None:
    session = Session(7, 0.0, 3, 50, (Turn(10, 4, 0.0), Turn(6, 2, 1.0)))
    conversation = Conversation(session, 16)
    first, num_output = conversation.take_prompt()
    second, _ = conversation.take_prompt()
    assert (len(first), num_output, len(second)) == (60, 4, 70)
    assert second[:60].tolist() == first.tolist()
    assert second[60:64].tolist() == [REPLY_TOKEN] * 4
    other, _ = Conversation(replace(session, key=8), 16).take_prompt()
    assert other[:50].tolist() == first[:50].tolist()
    assert other[50:].tolist() != first[50:].tolist()
    assert conversation.next_turn is None


def test_no_two_segments_begin_with_the_same_tokens() -> None:
    starts = {segment_tokens(key, part, 8).tobytes() for key in range(1000) for part in range(3)}
    assert len(starts) == 3000
    tokens = segment_tokens(1, 1, 5000)
    assert (tokens.dtype, tokens.min(), tokens.max()) == (np.int32, 0, REPLY_TOKEN - 1)
