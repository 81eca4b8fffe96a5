"""Drafts: their tokens, the requests that get them, and fewer steps for the same text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from jaxserve.ipc.engine_spec import Script
from jaxserve.scheduler.plan import NO_SLOT, StepPlan
from jaxserve.scheduler.prompt_lookup import continuation
from tests.engine.rig import Rig, add, expected, prompt

CUE = 11
PERIODIC = Script(cue=CUE, token_ids=(5, 6, 7) * 12)
BROKEN = Script(cue=CUE, token_ids=(5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 9, 3, 5, 6, 9, 3, 5, 6, 7, 8, 5, 6, 9, 3))
"""A text that repeats itself with changes."""
DECEIVING = Script(cue=CUE, token_ids=(5, 6, 7, 20, 5, 6, 8, 21, 5, 6, 9, 22, 5, 6, 3, 23, 5, 6, 4, 24, 5, 6, 12, 25))


@pytest.mark.parametrize(
    ("tokens", "count", "wanted"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 1, [4]),  # the latest place
        ([7, 1, 2, 3, 9, 1, 2, 4, 8, 7, 1, 2], 1, [3]),  # the place that agrees longest
        ([5, 6, 7, 5, 6, 7], 5, [5, 6, 7, 5, 6]),  # the match repeats
        ([4, 4, 4], 3, [4, 4, 4]),
        ([1, 2, 3, 9, 2], 3, []),  # only the last token occurred before
        ([1, 2], 3, []),
        ([1], 3, []),
        ([2, 2], 3, []),
        ([1, 2, 3, -1, 8, 1, 2], 3, [3]),  # a text ends at a negative number
        ([1, 2, -1, 8, 1, 2], 3, []),
    ],
)
def test_a_draft_is_what_followed_the_newest_tokens_before(tokens: list[int], count: int, wanted: list[int]) -> None:
    assert continuation(np.array(tokens, np.int32), count).tolist() == wanted


def drafting(script: Script, num_speculative_tokens: int = 4, **options: Any) -> Rig:
    return Rig(script=script, num_speculative_tokens=num_speculative_tokens, **options)


def num_guesses(plan: StepPlan) -> int:
    return int((plan.slots == NO_SLOT).sum())


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_decode_steps", [1, 8])
@pytest.mark.parametrize("script", [PERIODIC, BROKEN])
def test_drafts_save_steps_and_change_no_token(script: Script, max_decode_steps: int, depth: int) -> None:
    messages = [add("a", [CUE], max_tokens=20), add("b", [*prompt(5), CUE], max_tokens=24, temperature=1.0, seed=3)]
    rig = drafting(script, depth=depth, max_decode_steps=max_decode_steps)
    assert rig.run(*messages) == {message.request_id: expected(message, script=script) for message in messages}
    plain = Rig(script=script)
    plain.run(*messages)
    assert len(rig.plans) < 0.8 * len(plain.plans)
    stats = rig.scheduler.take_stats()
    assert (
        0
        < stats.spec_decode_num_accepted_tokens
        <= stats.spec_decode_num_draft_tokens
        == sum(map(num_guesses, rig.plans))
    )
    assert stats.generation_tokens == 44


def test_length_of_the_next_draft_follows_the_accepted_part() -> None:
    """If no token was accepted, the next match must be longer."""
    lengths = {}
    for script in (PERIODIC, DECEIVING):
        rig = drafting(script, num_speculative_tokens=6)
        rig.run(add("a", [CUE], max_tokens=24))
        lengths[script] = [num_guesses(plan) for plan in rig.plans if num_guesses(plan)]
    assert lengths[PERIODIC] == [6, 6, 4]  # as many as the length limit allows
    assert lengths[DECEIVING] == [6]


@pytest.mark.parametrize("end", ["length", "stop"])
def test_no_token_follows_an_end_in_the_middle_of_a_draft(end: str) -> None:
    message = add("a", [CUE], max_tokens=9 if end == "length" else 30, stop_token_ids=() if end == "length" else (9,))
    rig = drafting(BROKEN if end == "stop" else PERIODIC)
    rig.run(message)
    assert rig.tokens["a"] == expected(message, script=BROKEN if end == "stop" else PERIODIC)
    assert rig.ends["a"].finish_reason == end
    assert any(map(num_guesses, rig.plans))


def test_abort_ends_a_draft_in_flight() -> None:
    rig = drafting(PERIODIC, depth=1)
    rig.send(add("a", [CUE], max_tokens=30), add("b", [3, CUE], max_tokens=30))
    while not (rig.plans and num_guesses(rig.plans[-1])):
        rig.step()
    rig.collect(rig.scheduler.abort([rig.plans[-1].request_ids[0]]))
    rig.finish()
    assert rig.ends["a"].finish_reason == "abort"
    assert rig.tokens["b"] == expected(add("b", [3, CUE], max_tokens=30), script=PERIODIC)


@pytest.mark.parametrize("options", [{"presence_penalty": 1.0}, {"min_tokens": 3}, {"logit_bias": {5: 1.0}}])
def test_request_with_sampler_state_gets_no_drafts(options: dict[str, Any]) -> None:
    rig = drafting(PERIODIC)
    rig.run(add("a", [CUE], max_tokens=20, **options))
    assert not any(map(num_guesses, rig.plans))


def test_there_are_no_drafts_while_more_than_half_of_the_rows_are_taken() -> None:
    messages = [add(str(i), [i + 20, CUE], max_tokens=10 + 2 * i) for i in range(5)]
    rig = drafting(PERIODIC, max_num_seqs=4, max_num_batched_tokens=32)
    rig.run(*messages)
    for plan in rig.plans:
        num_requests = len(plan.request_ids) - num_guesses(plan)
        assert not num_guesses(plan) or num_requests <= 2
        assert len(plan.request_ids) <= 4
    assert any(map(num_guesses, rig.plans))


def test_a_draft_takes_no_page_from_others() -> None:
    """Two requests fill the pool to its last page: no request is preempted for a draft."""
    messages = [add(name, [first, CUE], max_tokens=30) for name, first in (("a", 20), ("b", 21))]
    rig = drafting(PERIODIC, num_blocks=17, block_size=4)
    rig.run(*messages)
    assert rig.scheduler.take_stats().num_preemptions == 0
    assert any(map(num_guesses, rig.plans))
    assert rig.tokens == {message.request_id: expected(message, script=PERIODIC) for message in messages}


def test_a_prediction_is_a_draft_from_the_first_token_on() -> None:
    message = add("a", prompt(5), max_tokens=40, temperature=1.0, seed=3)
    wanted = expected(message)
    nearly = [*wanted[:20], 3, *wanted[21:]]
    rig = Rig(num_speculative_tokens=7)
    assert rig.run(structs.replace(message, prediction_token_ids=nearly)) == {"a": wanted}
    assert len(rig.plans) < 12
    end = rig.ends["a"]
    assert 30 < end.num_accepted_tokens < 40
    assert 0 < end.num_rejected_tokens < 10
    assert Rig().run(structs.replace(message, prediction_token_ids=nearly)) == {"a": wanted}


def test_log_probabilities_belong_to_the_tokens_of_a_draft() -> None:
    """The alternatives of the fake executor are the token and its successors."""
    rig = drafting(PERIODIC)
    rig.send(add("a", [CUE], max_tokens=20, num_top_logprobs=2))
    told = []
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        assert plan is not None
        outputs = rig.scheduler.update(plan, rig.executor.submit(plan).result())
        rig.collect(outputs)
        told += [entry.top_token_ids for output in outputs for entry in output.logprobs or ()]
    assert told == [[token, token + 1] for token in rig.tokens["a"]]
    assert len(told) == 20
