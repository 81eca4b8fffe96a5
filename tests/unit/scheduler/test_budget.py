"""Tests how scheduling policies share the tokens of a step among prompts, on the fake executor."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from jaxserve.config import SchedulingPolicy
from jaxserve.ipc.messages import AddRequest
from jaxserve.types import RequestId
from tests.engine.rig import Rig, add, expected, prompt

POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
IN_ORDER: tuple[SchedulingPolicy, ...] = ("fcfs", "priority")


def long_prompts_then_a_short_one(policy: SchedulingPolicy) -> tuple[Rig, list[AddRequest]]:
    """Six prompts of 1,500 tokens, and after one step one of 5; the short one is the last message."""
    rig = Rig(
        num_blocks=600,
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=128,
        max_model_len=2048,
        scheduling_policy=policy,
    )
    messages = [add(f"long{i}", prompt(1500, i + 3), max_tokens=2) for i in range(6)]
    rig.send(*messages)
    rig.step()
    messages.append(add("short", prompt(5, 50), max_tokens=2))
    rig.send(messages[-1])
    return rig, messages


def test_short_prompt_beside_long_ones_is_computed_in_the_next_step() -> None:
    rig, messages = long_prompts_then_a_short_one("fair")
    assert rig.rows(rig.step()) == {"long0": 123, "short": 5}
    assert rig.rows(rig.step()) == {"long0": 127, "short": 1}
    assert list(rig.ends) == ["short"]
    rig.finish()
    assert list(rig.ends) == ["short", *(f"long{i}" for i in range(6))]
    assert rig.tokens == {message.request_id: expected(message) for message in messages}


@pytest.mark.slow
def test_policies_compute_a_load_in_equally_many_steps() -> None:
    num_steps = {}
    for policy in POLICIES:
        rig, _ = long_prompts_then_a_short_one(policy)
        rig.finish()
        num_steps[policy] = len(rig.plans)
    assert max(num_steps.values()) - min(num_steps.values()) <= 1, num_steps


@pytest.mark.parametrize("policy", IN_ORDER)
def test_policies_without_shares_compute_prompts_in_order_of_arrival(policy: SchedulingPolicy) -> None:
    rig, _ = long_prompts_then_a_short_one(policy)
    rig.finish()
    assert list(rig.ends) == [*(f"long{i}" for i in range(6)), "short"]


def test_half_of_the_budget_stays_with_the_first_in_rank() -> None:
    rig = Rig(max_num_batched_tokens=64, num_blocks=200, max_model_len=512)
    rig.send(add("first", prompt(300)))
    rig.step()
    rig.send(*[add(f"r{i}", prompt(60, i + 5)) for i in range(4)])
    for _ in range(4):
        assert rig.rows(rig.step())["first"] >= 32


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_prompt_takes_more_than_twice_the_steps_that_are_ahead_of_it_in_rank(seed: int) -> None:
    """The bound of docs/scheduling.md, under overload: every step brings prompts, most of them shorter than the others."""
    generator = random.Random(seed)
    rig = Rig(
        num_blocks=20_000,
        max_num_seqs=32,
        max_num_batched_tokens=96,
        max_queued_requests=10_000,
        max_model_len=512,
        enable_prefix_caching=False,
    )
    least = (96 - 32) // 2  # tokens that the order of rank has in every step
    last_steps: dict[str, int] = {}
    num_added = 0
    while len(rig.plans) < 120 or rig.scheduler.has_work:
        if len(rig.plans) < 120:
            for _ in range(generator.choice([0, 1, 2, 6])):
                num_added += 1
                length = generator.choice([1, 2, 5, 20, 60, 400])
                rig.send(add(f"r{num_added}", prompt(length, num_added), max_tokens=1))
                unfinished = [*rig.scheduler.running, *rig.scheduler.waiting]
                num_ahead = sum(each.num_tokens - each.num_computed_tokens for each in unfinished)
                last_steps[f"r{num_added}"] = len(rig.plans) + -(-num_ahead // least)
        rig.step()
        assert len(rig.scheduler.running) < 32, "the bound is one for requests that get rows"
        assert all(len(rig.plans) <= last_steps[each.request_id] for each in rig.scheduler.running)
        assert all(len(rig.plans) <= last_steps[each.request_id] for each in rig.scheduler.waiting)
    assert len(rig.ends) == num_added > 100


def test_shortest_prompt_does_not_overtake_one_of_a_better_priority() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.send(add("low", prompt(40)), add("high", prompt(40, 9), priority=-1), add("short", prompt(3, 5)))
    assert rig.rows(rig.step()) == {"high": 16}
    rig.finish()
    assert list(rig.ends) == ["high", "short", "low"]


@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_waiting_prompt_of_a_better_priority_goes_before_the_one_that_runs(policy: SchedulingPolicy) -> None:
    rig = Rig(scheduling_policy=policy)
    rig.send(add("low", prompt(60)))
    rig.step()
    rig.send(add("high", prompt(30, 9), priority=-1))
    assert rig.rows(rig.step()) == {"low": 1, "high": 15}


def test_prompt_counts_as_short_if_the_prefix_cache_has_most_of_it() -> None:
    rig = Rig(num_blocks=100)
    rig.run(add("turn1", prompt(60), max_tokens=1))
    rig.send(add("long", prompt(40, 5)))
    rig.step()
    rig.send(add("middle", prompt(12, 7)), add("turn2", [*prompt(60), 5, 6, 7]))
    assert rig.rows(rig.step()) == {"long": 9, "turn2": 3, "middle": 4}


def test_equal_prompts_that_wait_for_their_prefix_do_not_keep_others_waiting() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.send(add("one", prompt(42)), add("two", prompt(42)), add("short", prompt(44, 9)))
    rows = [rig.rows(rig.step()) for _ in range(5)]
    assert rows[2] == {"one": 10, "short": 6}, "the rest of a step in which the first in rank cannot start"
    assert rig.ends == {} or "two" not in rig.ends
    rig.finish()
    assert rig.ends["two"].num_cached_tokens == 40


def test_request_that_needs_many_pages_is_overtaken_by_a_bounded_number_of_short_ones() -> None:
    """Short requests arrive at every step and would keep the pool too full for ever."""
    rig = Rig(num_blocks=21, max_num_seqs=4, enable_prefix_caching=False)
    rig.send(add("holder", prompt(36), max_tokens=4))
    for _ in range(3):
        rig.step()
    rig.send(add("large", prompt(60, 9), max_tokens=4))
    overtakers = 0
    for i in range(60):
        rig.send(add(f"short{i}", prompt(8, i + 5), max_tokens=12))
        rig.step()
        is_waiting = any(each.request_id == "large" for each in rig.scheduler.waiting)
        overtakers += sum(init.startswith("short") for init in _started(rig)) if is_waiting else 0
        if not is_waiting:
            break
    assert 0 < overtakers <= 4
    assert not is_waiting, "it starts while short requests still arrive"
    rig.finish()


def _started(rig: Rig) -> list[str]:
    """Return the requests that have their first row in the newest plan."""
    before = {request_id for plan in rig.plans[:-1] for request_id in plan.request_ids}
    return [request_id for request_id in rig.plans[-1].request_ids if request_id not in before]


def test_preempted_request_is_not_overtaken_by_a_shorter_one() -> None:
    rig = Rig(num_blocks=8)
    rig.send(add("old", prompt(10), max_tokens=16), add("young", prompt(10, 5), max_tokens=8))
    while len(rig.rows(rig.step())) == 2:
        pass
    rig.send(add("new", prompt(1, 9), max_tokens=1))
    while "old" in rig.rows(rig.step()):
        assert rig.rows(rig.plans[-1]) == {"old": 1}, "there are pages for the new one, but it is not its turn"
    assert rig.rows(rig.plans[-1]).keys() == {"young", "new"}


def test_fcfs_rejects_priorities() -> None:
    rig = Rig(scheduling_policy="fcfs")
    error = rig.scheduler.add(add("r", prompt(3), priority=2))
    assert error is not None and error.param == "priority"
    assert error.message == (
        "priority 2 must be 0: this server answers first come, first served (--scheduling-policy fcfs)"
    )
    assert rig.scheduler.add(add("s", prompt(3))) is None


def test_aborted_requests_leave_the_order_of_length() -> None:
    rig = Rig(max_num_seqs=1)
    rig.send(*[add(f"r{i}", prompt(9 - i, i + 3), max_tokens=2) for i in range(5)])
    rig.step()
    rig.collect(rig.scheduler.abort([RequestId("r4"), RequestId("r2")]))
    rig.finish()
    assert list(rig.ends) == ["r4", "r2", "r0", "r1", "r3"]
