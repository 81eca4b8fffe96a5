"""Rows with a grammar in the scheduler: every token is from the mask after the previous token, in every case."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.executor.fake.experts import fake_experts
from jaxserve.ipc.messages import AddRequest, Grammar
from jaxserve.sampling.bits import pack_bits
from tests.engine.rig import VOCAB_SIZE, Rig, add, expected, prompt

LENGTH = 30


class Counting:
    """A grammar whose only text is the tokens first, first + 1, ...; ready at the second look.

    After each token it jumps forward by the next `num_jump_forward`.
    """

    error: str | None = None

    def __init__(self, first: int, num_jump_forward: int = 0, vocab_size: int = VOCAB_SIZE) -> None:
        self._vocab_size = vocab_size
        self._next = first
        self._last = first + LENGTH
        self._num_jump_forward = num_jump_forward
        self.num_looks = 0
        self._jumped: list[int] = []

    @property
    def mask(self) -> np.ndarray:
        return pack_bits([self._next], self._vocab_size)

    @property
    def is_ready(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 1

    @property
    def is_terminated(self) -> bool:
        return self._next == self._last

    def advance(self, token: int) -> None:
        assert token == self._next
        last = min(self._next + self._num_jump_forward, self._last - 1)
        self._jumped = list(range(self._next + 1, last + 1))
        self._next = last + 1
        self.num_looks = 0

    def take_jump_forward(self) -> list[int]:
        tokens, self._jumped = self._jumped, []
        return tokens

    def wait(self, seconds: float) -> None:
        pass


class CountingGrammars:
    def __init__(self, num_jump_forward: int = 0, vocab_size: int = VOCAB_SIZE) -> None:
        self._num_jump_forward = num_jump_forward
        self._vocab_size = vocab_size
        self.made: list[Counting] = []

    def follow(self, grammar: Grammar, allowed_token_ids: Collection[int], *, jump_forward: bool = False) -> Counting:
        num_jump_forward = self._num_jump_forward if jump_forward else 0
        self.made.append(Counting(int(grammar.text), num_jump_forward, self._vocab_size))
        return self.made[-1]


def counting(name: str, first: int) -> AddRequest:
    message = add(name, prompt(6, first), max_tokens=LENGTH + 5)
    return msgspec.structs.replace(message, grammar=Grammar("regex", str(first)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_decode_steps", [1, 4])
@pytest.mark.parametrize("num_blocks", [65, 14])
@pytest.mark.parametrize("num_jump_forward", [0, 1, 7])
def test_tokens_follow_the_grammar_beside_rows_without(
    depth: int, max_decode_steps: int, num_blocks: int, num_jump_forward: int
) -> None:
    rig = Rig(
        depth=depth,
        max_decode_steps=max_decode_steps,
        num_blocks=num_blocks,
        grammars=CountingGrammars(num_jump_forward),
    )
    held = [counting(f"held{i}", 5 + i) for i in range(3)]
    free = [add(f"free{i}", prompt(5, i), max_tokens=25) for i in range(2)]
    rig.send(*held, *free)
    run(rig)
    for i, message in enumerate(held):
        assert rig.tokens[message.request_id] == list(range(5 + i, 5 + i + LENGTH))
        assert rig.ends[message.request_id].finish_reason == "stop"
    for message in free:
        assert rig.tokens[message.request_id] == expected(message)
    assert rig.kv.usage == 0.0
    if num_blocks == 14:
        assert rig.scheduler.take_stats().num_preemptions > 0, "the pool was meant to be too small"


def run(rig: Rig) -> None:
    while rig.scheduler.has_work:
        rig.step()


def test_a_request_whose_grammar_is_compiled_counts_as_waiting() -> None:
    rig = Rig(grammars=CountingGrammars())
    rig.send(counting("a", 5), add("free", prompt(5), max_tokens=2))
    stats = rig.scheduler.take_stats()
    assert stats.num_requests_waiting == 2
    assert stats.num_requests_waiting_by_reason == {"capacity": 1, "deferred": 1}


def test_jump_forward_tokens_take_no_step() -> None:
    rig = Rig(grammars=CountingGrammars(num_jump_forward=4))
    rig.send(counting("a", 5))
    run(rig)
    assert rig.tokens["a"] == list(range(5, 5 + LENGTH))
    assert len(rig.plans) == LENGTH / 5
    stats = rig.scheduler.take_stats()
    assert (stats.generation_tokens, stats.forced_tokens) == (LENGTH, LENGTH * 4 / 5)
    assert len(stats.grammar_seconds) == 1


@pytest.mark.parametrize(("limits", "reason"), [({"max_tokens": 8}, "length"), ({"stop_token_ids": (12,)}, "stop")])
def test_jump_forward_ends_with_the_request(limits: dict[str, Any], reason: str) -> None:
    rig = Rig(grammars=CountingGrammars(num_jump_forward=4))
    message = counting("a", 5)
    rig.send(msgspec.structs.replace(message, sampling=dataclasses.replace(message.sampling, **limits)))
    run(rig)
    assert rig.tokens["a"] == list(range(5, 13))
    assert rig.ends["a"].finish_reason == reason
    assert rig.kv.usage == 0.0


@pytest.mark.parametrize("option", [{"num_top_logprobs": 0}, {"presence_penalty": 1.0}])
def test_every_token_is_sampled_for_requests_with_sampler_state_or_logprobs(option: dict[str, Any]) -> None:
    rig = Rig(grammars=CountingGrammars(num_jump_forward=4))
    message = counting("a", 5)
    rig.send(msgspec.structs.replace(message, sampling=dataclasses.replace(message.sampling, **option)))
    run(rig)
    assert rig.tokens["a"] == list(range(5, 5 + LENGTH))
    assert len(rig.plans) == LENGTH


def test_every_token_is_computed_for_requests_that_want_its_experts() -> None:
    """Also if the reply ends where a jump would."""
    rig = Rig(grammars=CountingGrammars(num_jump_forward=4), returns_experts=True)
    message = counting("a", 5)
    limits = dataclasses.replace(message.sampling, max_tokens=8)
    rig.send(msgspec.structs.replace(message, sampling=limits, returns_routed_experts=True))
    run(rig)
    assert rig.tokens["a"] == list(range(5, 13))
    text = np.array([*message.prompt_token_ids, *rig.tokens["a"][:-1]])
    assert rig.experts["a"] == b"".join(fake_experts(text[: i + 1]).tobytes() for i in range(len(text)))


def test_a_step_asks_no_grammar_of_a_request_that_only_waits() -> None:
    grammars = CountingGrammars()
    rig = Rig(max_num_seqs=1, grammars=grammars)
    rig.send(*[counting(f"r{i}", 5 + i) for i in range(4)])
    while "r0" not in rig.ends:
        rig.step()
    assert all(waiting.num_looks < 5 for waiting in grammars.made[1:]), f"{LENGTH} steps of another request"
    run(rig)
    assert [rig.tokens[f"r{i}"] for i in range(4)] == [list(range(5 + i, 5 + i + LENGTH)) for i in range(4)]


class Unprepared(Counting):
    """A grammar that is never ready; counts the waits for it."""

    num_waits = 0

    @property
    def is_ready(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        self.num_waits += 1


class LastUnprepared(CountingGrammars):
    """The second grammar is never ready."""

    def follow(self, grammar: Grammar, allowed_token_ids: Collection[int], *, jump_forward: bool = False) -> Counting:
        if not self.made:
            return super().follow(grammar, allowed_token_ids, jump_forward=jump_forward)
        self.made.append(Unprepared(int(grammar.text)))
        return self.made[-1]


def test_running_requests_do_not_wait_for_the_first_mask_of_another() -> None:
    grammars = LastUnprepared()
    rig = Rig(grammars=grammars)
    rig.send(counting("a", 5))
    while not rig.tokens.get("a"):
        rig.step()
    rig.send(counting("b", 40))
    other = grammars.made[1]
    assert isinstance(other, Unprepared)
    while "a" not in rig.ends:
        rig.step()
    assert other.num_waits == 0
    rig.step()
    assert other.num_waits == 1, "nothing else is left to compute"


def test_a_request_that_is_aborted_before_its_grammar_is_ready_leaves_nothing() -> None:
    rig = Rig(grammars=CountingGrammars())
    message = counting("a", 5)
    rig.send(message)
    (end,) = rig.scheduler.abort([message.request_id])
    assert end.finish_reason == "abort"
    assert not rig.scheduler.has_work
    assert rig.step() is None


def test_an_engine_without_grammars_rejects_them() -> None:
    (refusal,) = Rig().core.handle(counting("a", 5))
    assert refusal.error is not None
    assert refusal.error.error_class == "UnsupportedParameterError"
