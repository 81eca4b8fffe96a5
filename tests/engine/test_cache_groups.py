"""Windows and recurrent states beside the first cache group: every token is the one that the fake model computes alone.

The fake model raises if a page of a window, or a state, is not the one of its row.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from jaxserve.ipc.messages import AddRequest
from jaxserve.kv.block_table import BlockTable, HashChain
from jaxserve.kv.states import RecurrentStates
from tests.engine.rig import VOCAB_SIZE, Rig, add, expected, prompt

WINDOW = (12, 24)
"""Tokens of the window, and pages of 4 tokens."""
GROUPS = [
    pytest.param({"windows": (WINDOW,)}, id="window"),
    pytest.param({"num_state_slots": 12}, id="states"),
    pytest.param({"windows": (WINDOW,), "num_state_slots": 12}, id="both"),
    pytest.param({"num_ranks": 2, "num_blocks": 82, "num_state_slots": 20}, id="states of two ranks"),
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_random_requests_that_share_prefixes_get_their_own_tokens(
    groups: dict[str, Any], depth: int, seed: int
) -> None:
    """The pools are small, so that requests are preempted, pages evicted and snapshots dropped."""
    rng = random.Random(seed)
    rig = Rig(depth=depth, max_num_seqs=6, max_decode_steps=4, **{"num_blocks": 41, **groups})
    stems = [prompt(length, first) for length, first in ((9, 3), (24, 5), (40, 8))]
    messages: list[AddRequest] = []
    for number in range(40):
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
        message = add(f"r{number}", rng.choice(stems) + tail, max_tokens=rng.randrange(1, 40))
        messages.append(message)
        rig.send(message)
        for _ in range(rng.randrange(6)):
            rig.step()
        if number == 20:
            rig.collect(rig.scheduler.abort([messages[-1].request_id, messages[-3].request_id]))
    rig.finish()
    aborted = {name for name, end in rig.ends.items() if end.finish_reason == "abort"}
    assert len(aborted) <= 2
    for message in messages:
        if message.request_id not in aborted:
            assert rig.tokens[message.request_id] == expected(message)


def test_request_holds_no_more_pages_than_its_window() -> None:
    rig = Rig(windows=((12, 40),), max_model_len=256, num_blocks=80)
    rig.send(add("long", prompt(10), max_tokens=200))
    (pages,) = rig.kv.groups.windows
    most = 0
    while rig.scheduler.has_work:
        rig.step()
        most = max(most, pages.pool.num_usable - pages.pool.num_free)
    assert rig.tokens["long"] == expected(add("long", prompt(10), max_tokens=200))
    assert most <= 12 // 4 + 2


def test_long_prompt_is_not_preempted_for_pages_of_its_window() -> None:
    rig = Rig(windows=((12, 26),), max_model_len=256, num_blocks=200, max_num_batched_tokens=16)
    messages = [add(f"r{number}", prompt(150, 3 + number), max_tokens=5) for number in range(6)]
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert rig.scheduler.stats.num_preemptions == 0


def test_prefix_is_shared_only_as_far_as_the_pages_of_the_window_are_cached() -> None:
    rig = Rig(windows=((12, 26),), max_model_len=256, num_blocks=200)
    long = prompt(100)
    rig.run(add("first", long, max_tokens=1))
    rig.run(add("same", long, max_tokens=1))
    assert rig.ends["same"].num_cached_tokens == 96
    (pages,) = rig.kv.groups.windows
    pages.pool.allocate(pages.pool.num_free)  # evicts all of them
    assert rig.kv.find_prefix(rig.kv.new_table(None), _array([*long, 1])) == []


def _array(tokens: list[int]) -> Any:
    return np.array(tokens, np.int32)


def hits(rig: Rig, *messages: AddRequest) -> list[int]:
    """Run requests one after the other; return the tokens that each found in the cache."""
    for message in messages:
        rig.run(message)
        assert rig.tokens[message.request_id] == expected(message)
    return [rig.ends[message.request_id].num_cached_tokens for message in messages]


def test_shared_prefix_of_480_tokens_is_reused_from_the_third_request_on() -> None:
    rig = Rig(num_state_slots=20, max_model_len=1024, num_blocks=600, max_num_batched_tokens=256)
    stem = prompt(480)
    messages = [add(f"r{number}", [*stem, *prompt(60, 9 + number)], max_tokens=3) for number in range(6)]
    found = hits(rig, *messages)
    assert found[:2] == [0, 256], "a chunk of the first request ended there; the second one leaves a snapshot at 480"
    assert found[2:] == [480] * 4


def test_shared_prefix_with_a_long_suffix_is_reused() -> None:
    rig = Rig(num_state_slots=20, max_model_len=1024, num_blocks=900, max_num_batched_tokens=64)
    stem = prompt(100)
    messages = [add(f"r{number}", [*stem, *prompt(700, 9 + number)], max_tokens=3) for number in range(4)]
    found = hits(rig, *messages)
    assert found[1] >= 64, "a chunk of the first request ended there"
    assert found[2:] == [96, 96]


def test_next_turn_of_a_conversation_begins_near_the_end_of_a_long_prompt() -> None:
    rig = Rig(num_state_slots=20, max_model_len=1024, num_blocks=600, max_num_batched_tokens=1024)
    first = add("first", prompt(603), max_tokens=9)
    assert hits(rig, first) == [0]
    again = add("again", [*prompt(603), *rig.tokens["first"], *prompt(20, 50)], max_tokens=3)
    assert hits(rig, again) == [600]


@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("length", [1, 33, 480, 511, 512, 520, 700, 1000, 1023, 1024, 1500, 2000])
def test_a_prompt_that_hits_nothing_costs_little_more_than_without_prefix_caching(length: int, chunk: int) -> None:
    """Count the tokens that programs compute until the first token, padding included: the time of a prompt follows them."""
    costs = []
    for is_enabled in (True, False):
        rig = Rig(
            num_state_slots=20,
            max_model_len=4096,
            num_blocks=1200,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=is_enabled,
        )
        assert hits(rig, add("a", prompt(length), max_tokens=1)) == [0]
        costs.append([plan.bucket for plan in rig.plans])
    cached, plain = costs
    assert len(cached) <= len(plain) + 1
    assert sum(cached) <= 1.1 * sum(plain)


def test_states_are_not_snapshot_without_prefix_caching() -> None:
    rig = Rig(num_state_slots=9, max_model_len=256, num_blocks=200, enable_prefix_caching=False)
    assert hits(rig, *(add(f"r{number}", prompt(90), max_tokens=4) for number in range(3))) == [0, 0, 0]
    (states,) = rig.kv.groups.states
    assert len(states.snapshots) == 0


def test_failed_step_loses_every_snapshot() -> None:
    rig = Rig(num_state_slots=9, windows=(WINDOW,), max_model_len=256, num_blocks=200, fail_at_steps=frozenset({40}))
    messages = [add(f"r{number}", [*prompt(60), number], max_tokens=12) for number in range(6)]
    for message in messages:
        rig.send(message)
        while rig.core.has_work:
            step = rig.core.step()
            if step is not None:
                rig.collect(step.outputs)
    ended = [message for message in messages if rig.ends[message.request_id].finish_reason == "length"]
    assert len(ended) >= len(messages) - 1
    assert all(rig.tokens[message.request_id] == expected(message) for message in ended)


def test_call_of_several_steps_leaves_no_snapshot_of_its_first_one() -> None:
    """The neighbour leaves 7 of 8 tokens, so that the last of the prompt is computed by the call that also decodes."""
    rig = Rig(num_state_slots=12, max_num_seqs=2, max_num_batched_tokens=8, max_decode_steps=4)
    rig.send(add("neighbour", prompt(5, 50), max_tokens=60))
    rig.step()
    rig.step()
    rig.send(add("prompt", prompt(16), max_tokens=9))
    while not rig.tokens.get("prompt"):
        plan = rig.step()
    assert plan is not None
    assert (rig.rows(plan)["prompt"], plan.num_steps) == (1, 4)
    rig.finish()
    assert hits(rig, add("again", [*prompt(16), 9, 9], max_tokens=3)) == [8]


def test_slot_that_a_row_reads_is_written_by_no_other_row_of_the_step() -> None:
    states = RecurrentStates(4, block_size=4, unit_tokens=8)
    tables = [BlockTable(8, HashChain(4, None)) for _ in range(2)]
    for first, table in enumerate(tables):
        states.start(table.state, None, num_tokens=24, branch=8)
        states.assign(table, 8, is_chunk=True)
        table.chain.hash(1, _array(prompt(8, 3 + first)))
        table.num_published = 2
    (read, written), (_, other) = (states.assign(table, 16, is_chunk=True) for table in tables)
    assert read not in (written, other)
    for table in tables:
        states.free(table)
    assert (states.num_free, len(states.snapshots)) == (3, 1)
