"""Speculative steps of a draft model: fewer steps for the same text, the requests that get drafts, and when it is on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxserve.scheduler.plan import Buckets, StepResult
from jaxserve.scheduler.speculation import MAX_MISSING, NUM_TRIALS, Payoff
from tests.engine.rig import EOS, VOCAB_SIZE, Rig, add, expected, prompt

NUM_DRAFTS = 3


def kinds(rig: Rig) -> Counter[str]:
    return Counter(plan.kind for plan in rig.plans)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_decode_steps", [1, 8])
@pytest.mark.parametrize("windows", [(), ((8, 40),)])
def test_drafts_save_steps_and_change_no_token(
    max_decode_steps: int, depth: int, windows: tuple[tuple[int, int], ...]
) -> None:
    messages = [
        add("greedy", prompt(5), max_tokens=40),
        add("sampled", prompt(9, 4), max_tokens=50, temperature=1.0, seed=3),
    ]
    rig = Rig(
        num_drafts=NUM_DRAFTS,
        depth=depth,
        max_decode_steps=max_decode_steps,
        windows=windows,
        max_num_batched_tokens=8,
    )
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    stats = rig.scheduler.take_stats()
    # One of four guesses is wrong, so a row gets two to four tokens a step.
    assert kinds(rig)["speculate"] + kinds(rig)["decode"] < 30
    assert 40 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
    assert stats.spec_decode_num_draft_tokens <= NUM_DRAFTS * stats.spec_decode_num_drafts
    ends = rig.ends.values()
    assert sum(end.num_accepted_tokens for end in ends) == stats.spec_decode_num_accepted_tokens


@pytest.mark.parametrize(
    ("decode", "max_num_seqs", "expected_sizes"),
    [((1, 2, 4), 4, (1, 2)), ((1, 4), 4, (1, 4)), ((2, 4, 6), 6, (2, 4)), ((1,), 1, (1,)), ((2,), 2, (2,))],
)
def test_up_to_half_of_the_rows_have_a_speculative_program(
    decode: tuple[int, ...], max_num_seqs: int, expected_sizes: tuple[int, ...]
) -> None:
    buckets = Buckets(decode, (8,), max_num_seqs, num_drafts=NUM_DRAFTS)
    assert buckets.speculate == expected_sizes
    assert buckets.max_speculative_rows == max(1, max_num_seqs // 2)
    assert Buckets(decode, (8,), max_num_seqs).speculate == ()


def test_speculative_steps_overlap() -> None:
    """The next one is submitted before the last one is read, with positions that only the device knows."""
    rig = Rig(num_drafts=NUM_DRAFTS, depth=1)
    message = add("a", prompt(5), max_tokens=60)
    assert rig.run(message) == {"a": expected(message)}
    unread = [plan.is_position_unread for plan in rig.plans if plan.is_position_unread is not None]
    assert sum(int(flags.sum()) for flags in unread) > len(unread) // 2


@pytest.mark.parametrize("end", ["length", "stop", "eos"])
@pytest.mark.parametrize("depth", [0, 1])
def test_no_token_follows_an_end_in_the_middle_of_a_draft(end: str, depth: int) -> None:
    plain = expected(add("a", prompt(5), max_tokens=40))
    options: dict[str, Any] = {"max_tokens": 11 if end == "length" else 100}
    if end == "stop":
        options["stop_token_ids"] = (next(token for i, token in enumerate(plain) if i > 8 and token not in plain[:i]),)
    first, message = 3, add("a", prompt(5), **options)
    if end == "eos":
        for first in range(3, 60):
            message = add("a", prompt(5, first), max_tokens=100, ignore_eos=False)
            if expected(message)[-1] == EOS and len(expected(message)) > 8:
                break
    rig = Rig(num_drafts=NUM_DRAFTS, depth=depth, max_model_len=128)
    rig.run(message)
    assert rig.tokens["a"] == expected(message)
    assert rig.ends["a"].finish_reason == ("length" if end == "length" else "stop")
    assert kinds(rig)["speculate"] > 2


@pytest.mark.parametrize("options", [{"presence_penalty": 1.0}, {"min_tokens": 3}, {"num_top_logprobs": 2}], ids=str)
def test_request_that_gets_no_drafts_has_one_token_of_a_speculative_step(options: dict[str, Any]) -> None:
    messages = [add("a", prompt(5), max_tokens=30, **options), add("b", prompt(6, 4), max_tokens=60)]
    rig = Rig(num_drafts=NUM_DRAFTS)
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert rig.ends["a"].num_accepted_tokens == rig.ends["a"].num_rejected_tokens == 0
    assert rig.ends["b"].num_accepted_tokens > 20
    lengths = [plan.draft_lengths.tolist() for plan in rig.plans if plan.draft_lengths is not None]
    assert any(len(each) == 2 and each[0] == 0 < each[1] for each in lengths)


def test_steps_of_more_than_half_of_the_rows_are_decode_steps() -> None:
    messages = [add(str(i), prompt(4, i + 3), max_tokens=20 if i else 10) for i in range(3)]
    rig = Rig(num_drafts=NUM_DRAFTS, max_num_seqs=4, max_num_batched_tokens=32)
    rig.send(*messages)
    last = add("last", prompt(4, 30), max_tokens=50)
    while len(rig.ends) < 3:
        rig.step()
    assert rig.run(last) == {message.request_id: expected(message) for message in [*messages, last]}
    assert all(len(plan.request_ids) <= 2 for plan in rig.plans if plan.kind == "speculate")
    assert kinds(rig)["speculate"] > 0


def test_a_request_that_the_draft_model_lost_gets_no_drafts() -> None:
    """Decode steps leave the draft model out. After a few tokens its guesses would be worth nothing."""
    messages = [add(str(i), prompt(4, i + 3), max_tokens=60 if i == 0 else MAX_MISSING + 3) for i in range(3)]
    rig = Rig(num_drafts=NUM_DRAFTS, max_num_seqs=4, max_num_batched_tokens=32)
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert "speculate" not in kinds(rig)


def test_a_draft_takes_no_page_from_others() -> None:
    """Two requests fill the pool to its last page: no request is preempted for a draft."""
    messages = [add(name, prompt(2, first), max_tokens=30) for name, first in (("a", 20), ("b", 21))]
    rig = Rig(num_drafts=NUM_DRAFTS, num_blocks=17, block_size=4)
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert rig.scheduler.take_stats().num_preemptions == 0
    assert kinds(rig)["speculate"] > 5


def test_preempted_requests_are_drafted_for_again() -> None:
    messages = [add(name, prompt(6, first), max_tokens=34) for name, first in (("a", 20), ("b", 21), ("c", 22))]
    rig = Rig(num_drafts=NUM_DRAFTS, num_blocks=20, block_size=4, depth=1)
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert rig.scheduler.take_stats().num_preemptions > 0
    assert rig.ends["c"].num_accepted_tokens > 0


def test_a_failed_step_loses_no_token() -> None:
    """Its requests are computed again, one after the other until the culprit would be found."""
    messages = [add("a", prompt(5), max_tokens=40), add("b", prompt(5, 9), max_tokens=40, temperature=1.0, seed=3)]
    rig = Rig(num_drafts=NUM_DRAFTS, depth=1, fail_at_steps=frozenset({6}))
    rig.send(*messages)
    while rig.core.has_work:
        step = rig.core.step()
        rig.collect([] if step is None else step.outputs)
    assert rig.tokens == {message.request_id: expected(message) for message in messages}


class Device:
    """Observes steps whose times are given, as a device would report them."""

    def __init__(self, decode_ms: float, speculative_ms: float, num_tokens: int) -> None:
        self.payoff = Payoff(Buckets((1, 2), (8,), 4, num_drafts=NUM_DRAFTS))
        self._ms = {"decode": decode_ms, "speculate": speculative_ms}
        self._num_tokens = num_tokens
        rig = Rig(num_drafts=NUM_DRAFTS)
        rig.run(add("a", prompt(3), max_tokens=60))
        self._plans = {plan.kind: plan for plan in rig.plans}

    def run(self, count: int) -> list[str]:
        """Do `count` steps of one row; returns what was chosen."""
        return [self._step() for _ in range(count)]

    def _step(self) -> str:
        choice = self.payoff.choose(1)
        kind = "speculate" if choice == "speculate" else "decode"
        nothing = np.zeros((1, 1), np.int32)
        result = StepResult(nothing, nothing, nothing, nothing, self._ms[kind] / 1000)
        self.payoff.observe(self._plans[kind], result, self._num_tokens if kind == "speculate" else 1)
        return choice


def test_speculation_goes_on_while_it_yields_more_tokens_per_second() -> None:
    device = Device(decode_ms=10, speculative_ms=20, num_tokens=3)
    choices = device.run(300)
    assert choices[:NUM_TRIALS] == ["speculate"] * NUM_TRIALS
    assert Counter(choices) == {"speculate": 298, "measure": 2}
    assert device.payoff.pays


def test_speculation_that_does_not_pay_ends_and_is_tried_again_later_each_time() -> None:
    device = Device(decode_ms=10, speculative_ms=20, num_tokens=1)
    choices, pays = [], []
    for _ in range(400):
        pays.append(device.payoff.pays)
        choices += device.run(1)
    assert [each or choice == "decode" for each, choice in zip(pays, choices, strict=True)] == [True] * 400
    assert pays.count(False) == choices.count("decode")
    starts = [i for i in range(1, 400) if choices[i] == "speculate" != choices[i - 1]]
    assert choices.count("speculate") == NUM_TRIALS * (1 + len(starts))
    assert starts == [NUM_TRIALS + 64, 2 * NUM_TRIALS + 64 + 128]


def test_a_prompt_beside_makes_a_mixed_step() -> None:
    rig = Rig(num_drafts=NUM_DRAFTS, depth=1)
    one, other = add("a", prompt(5), max_tokens=50), add("b", prompt(30, 8), max_tokens=20)
    rig.send(one)
    while kinds(rig)["speculate"] < 4:
        rig.step()
    rig.send(other)
    rig.finish()
    assert rig.tokens == {"a": expected(one), "b": expected(other)}
    assert kinds(rig)["mixed"] >= 3
    assert max(rig.tokens["a"]) < VOCAB_SIZE


def test_a_gauge_says_whether_speculation_is_on() -> None:
    rig = Rig(num_drafts=NUM_DRAFTS)
    rig.run(add("a", prompt(5), max_tokens=20))
    assert rig.scheduler.take_stats().spec_decode_is_on == 1
    plain = Rig()
    plain.run(add("a", prompt(5), max_tokens=20))
    assert plain.scheduler.take_stats().spec_decode_is_on == 0
