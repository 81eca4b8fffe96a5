"""Only requests that fail alone end, also when several fail and when they fail late."""

from __future__ import annotations

import random

import pytest

from jaxserve.scheduler.isolation import Isolation


class Device:
    """Runs all enqueued requests in one step, which fails if one of them has reached the token that it cannot bear."""

    def __init__(self, fails_at: dict[str, int], num_tokens: int) -> None:
        self.fails_at = fails_at
        self.num_tokens = num_tokens
        self.made = dict.fromkeys(fails_at, 0)
        self.running: list[str] = []
        self.ended: list[str] = []
        self.num_failures = 0
        self.isolation: Isolation[str] = Isolation(self.running.append, self.made.__getitem__)
        self.running += fails_at

    def run(self) -> None:
        while self.running:
            self.step()

    def step(self) -> None:
        self.isolation.advance()
        rows = list(self.running)
        if any(self.made[row] == self.fails_at[row] for row in rows):
            self.fail(rows)
            return
        for row in rows:
            self.made[row] += 1
            if self.made[row] == self.num_tokens:
                self.running.remove(row)
                self.isolation.forget(row)
        self.isolation.advance()

    def fail(self, rows: list[str]) -> None:
        self.num_failures += 1
        self.running.clear()
        culprit = self.isolation.fail(rows, rows)
        if culprit is not None:
            self.ended.append(culprit)
            self.isolation.forget(culprit)


NEVER = -1


def test_one_that_always_fails_is_found_by_halves() -> None:
    device = Device(dict.fromkeys("abcdefgh", NEVER) | {"f": 0}, num_tokens=9)
    device.run()
    assert device.ended == ["f"]
    assert device.num_failures <= 2 + 3


def test_a_cleared_request_that_fails_later_does_not_end_the_last_suspect() -> None:
    """`a` is cleared after two tokens and fails at its fourth, beside `b`, which is under test."""
    device = Device({"a": 4, "b": NEVER, "c": 2}, num_tokens=9)
    device.run()
    assert sorted(device.ended) == ["a", "c"]
    assert device.made["b"] == 9


@pytest.mark.parametrize("seed", range(100))
def test_no_innocent_request_ends(seed: int) -> None:
    draw = random.Random(seed)
    names = [f"r{index}" for index in range(draw.randint(1, 9))]
    guilty = draw.sample(names, k=draw.randint(0, min(3, len(names))))
    device = Device({name: draw.randrange(8) if name in guilty else NEVER for name in names}, num_tokens=9)
    device.run()
    assert sorted(device.ended) == sorted(guilty)
