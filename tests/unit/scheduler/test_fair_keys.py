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


def of_key(name: str, number: int, length: int = 24, max_tokens: int = 8) -> AddRequest:
    message = add(f"{name}{number}", prompt(length, number + 3), max_tokens=max_tokens)
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
