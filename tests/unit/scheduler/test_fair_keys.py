"""A key that floods the engine leaves another key's requests their turn; requests of one key keep their order."""

from __future__ import annotations

import random
from statistics import quantiles

import msgspec
import pytest

from jaxserve.config import SchedulingPolicy
from jaxserve.ipc.messages import AddRequest
from jaxserve.types import RequestId
from tests.engine.rig import Rig, add, expected, prompt

NUM_ROWS = 8


def busy_rig(policy: SchedulingPolicy = "fair") -> Rig:
    return Rig(
        num_blocks=800,
        block_size=4,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=32,
        max_queued_requests=1000,
        max_model_len=128,
        scheduling_policy=policy,
    )


def of_key(name: str, number: int, length: int = 24, max_tokens: int = 8, priority: int = 0) -> AddRequest:
    message = add(f"{name}{number}", prompt(length, number + 3), priority=priority, max_tokens=max_tokens)
    return msgspec.structs.replace(message, key_name=name)


def steps_to_first_token(rig: Rig, message: AddRequest) -> int:
    rig.send(message)
    num_steps = 0
    while not rig.tokens.get(message.request_id):
        rig.step()
        num_steps += 1
    return num_steps


def waits(rig: Rig, count: int, first: int = 1) -> list[int]:
    """Return the steps to the first token of `count` requests of key `b`, each sent when the last one has ended."""
    found = []
    for number in range(first, first + count):
        message = of_key("b", number)
        found.append(steps_to_first_token(rig, message))
        while message.request_id not in rig.ends:
            rig.step()
    return found


def test_a_flooding_key_leaves_the_p95_time_to_first_token_of_another_within_twice() -> None:
    """Counted in steps; the first request of the other key comes before the flood, so that both keys are known."""
    alone = waits(busy_rig(), 20)
    rig = busy_rig()
    waits(rig, 1, first=90)
    rig.send(*(of_key("a", number) for number in range(400)))
    rig.step()
    beside = waits(rig, 20)
    assert quantiles(beside, n=20)[-1] <= 2 * quantiles(alone, n=20)[-1]
    assert sum(str(name).startswith("a") for name in rig.ends) > 20, "the flood goes on meanwhile"
    assert rig.tokens[RequestId("b3")] == expected(of_key("b", 3))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_let_a_flood_go_first(policy: SchedulingPolicy) -> None:
    rig = busy_rig(policy)
    rig.send(*(of_key("a", number) for number in range(100)))
    rig.step()
    assert steps_to_first_token(rig, of_key("b", 1)) > 50


def test_keys_that_wait_take_turns_by_tokens() -> None:
    """Key `b` asks for three times as much in each request, so it gets one where `a` gets three."""
    rig = busy_rig()
    rig.send(*(of_key("a", number, length=8, max_tokens=4) for number in range(60)))
    rig.send(*(of_key("b", number, length=32, max_tokens=4) for number in range(30)))
    while sum(str(name).startswith("b") for name in rig.ends) < 10:
        rig.step()
    ended = [str(name) for name in rig.ends]
    assert 20 <= sum(name.startswith("a") for name in ended) <= 40, ended
    assert [name for name in ended if name.startswith("b")] == [f"b{number}" for number in range(10)]


def test_requests_of_one_key_start_in_their_order() -> None:
    rig = busy_rig()
    draw = random.Random(1)
    messages = [of_key("a", number, draw.randint(1, 60), draw.randint(1, 20)) for number in range(40)]
    rig.send(*messages)
    ranks = [rig.scheduler.requests[message.request_id].rank for message in messages]
    assert ranks == sorted(ranks)


def test_one_key_alone_has_every_row() -> None:
    rig = busy_rig()
    rig.send(*(of_key("a", number, length=4) for number in range(20)))
    most = 0
    for _ in range(20):
        rig.step()
        most = max(most, len(rig.scheduler.running))
    assert most == NUM_ROWS


def test_a_key_owes_nothing_after_the_engine_was_idle() -> None:
    rig = busy_rig()
    rig.send(*(of_key("a", number, length=100, max_tokens=20) for number in range(5)))
    rig.send(of_key("b", 1, length=4, max_tokens=1))
    rig.finish()
    rig.send(of_key("a", 10, length=30), of_key("b", 10, length=30))
    first, second = (rig.scheduler.requests[RequestId(name)].rank for name in ("a10", "b10"))
    assert first[1] == second[1]


def beside_a_flood(*messages: AddRequest) -> Rig:
    """Return an engine in which these requests wait beside 400 of key `b`."""
    rig = busy_rig()
    rig.send(*(of_key("b", number) for number in range(400)))
    rig.step()
    rig.send(*messages)
    return rig


def ids(messages: list[AddRequest]) -> list[RequestId]:
    return [message.request_id for message in messages]


def test_cancelled_requests_that_never_started_cost_their_key_nothing() -> None:
    cancelled = [of_key("a", number) for number in range(400)]
    rig = beside_a_flood(*cancelled)
    rig.scheduler.abort(ids(cancelled))
    assert steps_to_first_token(rig, of_key("a", 999)) < 10


def test_requests_move_up_when_earlier_ones_of_their_key_are_cancelled() -> None:
    """They get the turns that they would have had without the cancelled ones, and keep their order."""
    messages = [of_key("a", number, length=1 + number % 47) for number in range(300)]
    rig = beside_a_flood(*messages)
    kept = [messages[number] for number in (40, 99, 100, 230)]
    cancelled = [message for message in messages if message not in kept]
    random.Random(1).shuffle(cancelled)
    for message in cancelled:
        rig.scheduler.abort([message.request_id])
    kept.append(of_key("a", 999))
    rig.send(kept[-1])
    tags, expected_tags = (
        [engine.scheduler.requests[message.request_id].rank[1] for message in kept]
        for engine in (rig, beside_a_flood(*kept))
    )
    assert tags == expected_tags == sorted(tags)
    rig.finish()
    assert all(rig.tokens[message.request_id] == expected(message) for message in kept)


def test_requests_that_never_started_do_not_count_in_the_expected_output() -> None:
    rig = beside_a_flood()
    cancelled = [of_key("a", number, max_tokens=40) for number in range(3)]
    rig.send(*cancelled)
    rig.scheduler.abort(ids(cancelled))
    one, two = of_key("a", 10, max_tokens=40), of_key("a", 11)
    rig.send(one, two)
    first, second = (rig.scheduler.requests[message.request_id].rank[1] for message in (one, two))
    assert second - first == 24 + 40


def test_a_request_that_started_costs_its_key_what_it_was_expected_to() -> None:
    rig = beside_a_flood(of_key("a", 1))
    while not rig.tokens.get("a1"):
        rig.step()
    rig.scheduler.abort([RequestId("a1")])
    rig.send(of_key("a", 2))
    assert rig.scheduler.requests[RequestId("a2")].rank[1] >= 24 + 8


def test_a_busy_key_of_a_better_priority_does_not_delay_a_new_key() -> None:
    rig = beside_a_flood(*(of_key("c", number, length=100, priority=-1) for number in range(200)))
    while sum(str(name).startswith("c") for name in rig.ends) < 150:
        rig.step()
    rig.send(of_key("d", 1))
    waiting = [request.request_id for request in rig.scheduler.waiting if request.rank[0] == 0]
    assert waiting.index(RequestId("d1")) < 3
    assert len(waiting) > 300


def test_priorities_without_requests_are_forgotten() -> None:
    rig = busy_rig()
    for number in range(30):
        rig.run(of_key("a", number, priority=number))
    fair_keys = rig.scheduler._fair_keys
    assert fair_keys is not None
    assert not fair_keys._turns
