"""The embedding scheduler: texts per step, order, ends, with made-up results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import SchedulerConfig
from jaxserve.errors import InternalError
from jaxserve.ipc.messages import AddRequest
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.admission import error_info
from jaxserve.scheduler.embedding import EmbedScheduler
from jaxserve.scheduler.plan import Buckets, EmbedPlan, EmbedResult
from jaxserve.types import RequestId

ERROR = error_info(InternalError("broken"))


def scheduler(max_num_seqs: int = 4, max_queued_requests: int = 100) -> EmbedScheduler:
    config = SchedulerConfig(max_queued_requests=max_queued_requests)
    return EmbedScheduler(config, Buckets((), (8, 16, 20), max_num_seqs), 16, 100, clock=lambda: 5.0)


def add(texts: EmbedScheduler, name: str, length: int, priority: int = 0, key_name: str = "") -> None:
    message = AddRequest(RequestId(name), [7] * length, EngineSamplingParams(), priority, key_name=key_name)
    assert texts.add(message) is None


def result(plan: EmbedPlan) -> EmbedResult:
    return EmbedResult(np.arange(len(plan.request_ids) * 2, dtype=np.float32).reshape(-1, 2), 0.1)


def scheduled(texts: EmbedScheduler) -> EmbedPlan:
    plan = texts.schedule()
    assert plan is not None
    return plan


def test_a_step_takes_whole_texts_in_order_while_tokens_last() -> None:
    texts = scheduler()
    for name, length in (("a", 9), ("b", 7), ("c", 8), ("d", 1)):
        add(texts, name, length)
    first, second = scheduled(texts), scheduled(texts)
    assert (first.request_ids, first.bucket, first.num_padding_tokens) == (("a", "b"), 16, 0)
    assert (second.request_ids, second.bucket) == (("c", "d"), 16), (
        "d would have fitted the first step: nobody overtakes"
    )
    assert texts.schedule() is None
    assert texts.has_work


def test_a_lower_priority_value_goes_first_and_rows_are_bounded() -> None:
    texts = scheduler(max_num_seqs=2)
    for name, priority in (("late", 5), ("b", 0), ("c", 0)):
        add(texts, name, 1, priority)
    assert scheduled(texts).request_ids == ("b", "c")
    assert scheduled(texts).request_ids == ("late",)


def test_each_text_gets_its_own_vector_and_ends() -> None:
    texts = scheduler()
    add(texts, "a", 2)
    add(texts, "b", 3)
    plan = scheduled(texts)
    a, b = texts.update(plan, result(plan))
    assert (a.request_id, a.finish_reason, a.vector) == ("a", "stop", np.array([0, 1], "<f4").tobytes())
    assert b.vector == np.array([2, 3], "<f4").tobytes()
    assert not texts.has_work
    assert texts.take_stats().prompt_tokens == 5
    assert texts.take_stats().prompt_tokens == 0, "counted once"


def test_the_text_that_fails_is_found_by_halves_and_ends_alone() -> None:
    texts = scheduler(max_num_seqs=4)
    for name in "abcde":
        add(texts, name, 1)
    groups, ended = [], []
    while (plan := texts.schedule()) is not None:
        groups.append("".join(plan.request_ids))
        ended += texts.fail(plan, ERROR) if "c" in plan.request_ids else texts.update(plan, result(plan))
    assert groups == ["abcd", "ab", "cd", "c", "d", "e"]
    assert [(output.request_id, output.finish_reason) for output in ended] == [
        ("a", "stop"),
        ("b", "stop"),
        ("c", "error"),
        ("d", "stop"),
        ("e", "stop"),
    ]


def test_cancelled_texts_that_never_started_cost_their_key_nothing() -> None:
    texts = scheduler(max_num_seqs=1)
    for key in "ba":
        for number in range(20):
            add(texts, f"{key}{number}", 9, key_name=key)
    texts.abort([RequestId(f"a{number}") for number in range(19)])
    assert [scheduled(texts).request_ids for _ in range(3)] == [("b0",), ("a19",), ("b1",)]


def test_texts_are_expected_to_have_no_output() -> None:
    texts = scheduler(max_num_seqs=1)
    for key in "ba":
        add(texts, f"{key}0", 1, key_name=key)
        plan = scheduled(texts)
        texts.update(plan, result(plan))
    for key, length in (("b", 8), ("a", 2)):
        for number in range(1, 5):
            add(texts, f"{key}{number}", length, key_name=key)
    order = [scheduled(texts).request_ids[0] for _ in range(6)]
    assert order == ["b1", "a1", "a2", "a3", "a4", "b2"]


def test_texts_of_later_steps_are_computed_again() -> None:
    texts = scheduler(max_num_seqs=1)
    for name in "abc":
        add(texts, name, 1)
    first, _ = scheduled(texts), scheduled(texts)
    ended = texts.fail(first, ERROR)
    assert [(output.request_id, output.error) for output in ended] == [("a", ERROR)]
    assert scheduled(texts).request_ids == ("b",)


def test_the_queue_is_bounded_and_ids_are_unique() -> None:
    texts = scheduler(max_num_seqs=1, max_queued_requests=1)
    add(texts, "a", 1)
    twice = texts.add(AddRequest(RequestId("a"), [1], EngineSamplingParams()))
    assert twice is not None
    assert twice.error_class == "InvalidRequestError"
    add(texts, "b", 1)
    full = texts.add(AddRequest(RequestId("c"), [1], EngineSamplingParams()))
    assert full is not None
    assert full.error_class == "RateLimitError"


@pytest.mark.parametrize("tokens", [[], [100], [-1], [7] * 17])
def test_invalid_text_is_rejected(tokens: list[int]) -> None:
    assert scheduler().add(AddRequest(RequestId("a"), tokens, EngineSamplingParams())) is not None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "step", "land", "abort", "fail"]), st.integers(1, 16)), max_size=40))
def test_every_text_ends_exactly_once_whatever_happens(operations: list[tuple[str, int]]) -> None:
    texts, plans, ended, names = scheduler(), [], [], []
    for operation, number in operations:
        if operation == "add":
            names.append(f"r{len(names)}")
            add(texts, names[-1], number)
        elif operation == "step":
            plans += [plan] if (plan := texts.schedule()) else []
        elif operation == "land" and plans:
            plan = plans.pop(0)
            ended += texts.update(plan, result(plan))
        elif operation == "fail" and plans:
            ended += texts.fail(plans[0], ERROR)
            plans.clear()
        elif operation == "abort" and names:
            ended += texts.abort([RequestId(names[number % len(names)])])
    ended += texts.abort_all(ERROR)
    assert sorted(str(output.request_id) for output in ended) == sorted(names)
    for plan in plans:
        assert texts.update(plan, result(plan)) == []
    assert not texts.has_work
