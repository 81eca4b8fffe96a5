"""Drafts: their tokens, the requests that get them, and fewer steps for the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from jaxserve.ipc.engine_spec import Script
from jaxserve.runner.inputs import INPUT_FIELDS, Program, pack, split
from jaxserve.scheduler.budget import PrefillBudget
from jaxserve.scheduler.plan import NO_SLOT, UNREAD_TOKEN, StepPlan
from jaxserve.scheduler.prompt_lookup import continuation
from jaxserve.scheduler.speculation import Payoff
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


def chunked(script: Script, **options: Any) -> Rig:
    """Return a rig of a model with recurrent states, whose drafts are verified as chunks."""
    states = {"num_drafts": 4, "plans_have_drafts": True, "num_state_slots": 25}
    return drafting(script, **{**states, **options})


def num_guesses(plan: StepPlan) -> int:
    return int((plan.slots == NO_SLOT).sum()) + (0 if plan.draft_lengths is None else int(plan.draft_lengths.sum()))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_decode_steps", [1, 8])
@pytest.mark.parametrize("script", [PERIODIC, BROKEN])
@pytest.mark.parametrize("made", [drafting, chunked])
def test_drafts_save_steps_and_change_no_token(
    made: Callable[..., Rig], script: Script, max_decode_steps: int, depth: int
) -> None:
    messages = [add("a", [CUE], max_tokens=20), add("b", [*prompt(5), CUE], max_tokens=24, temperature=1.0, seed=3)]
    rig = made(script, depth=depth, max_decode_steps=max_decode_steps)
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
@pytest.mark.parametrize("made", [drafting, chunked])
def test_no_token_follows_an_end_in_the_middle_of_a_draft(made: Callable[..., Rig], end: str) -> None:
    message = add("a", [CUE], max_tokens=9 if end == "length" else 30, stop_token_ids=() if end == "length" else (9,))
    rig = made(BROKEN if end == "stop" else PERIODIC)
    rig.run(message)
    assert rig.tokens["a"] == expected(message, script=BROKEN if end == "stop" else PERIODIC)
    assert rig.ends["a"].finish_reason == end
    assert any(map(num_guesses, rig.plans))


@pytest.mark.parametrize("made", [drafting, chunked])
def test_abort_ends_a_draft_in_flight(made: Callable[..., Rig]) -> None:
    """The other request gets no drafts, so nothing else keeps its next step from being planned too early."""
    other = add("b", [3, CUE], max_tokens=30, presence_penalty=1.0)
    rig = made(PERIODIC, depth=1)
    rig.send(add("a", [CUE], max_tokens=30), other)
    while not (rig.plans and num_guesses(rig.plans[-1])):
        rig.step()
    rig.collect(rig.scheduler.abort([rig.plans[-1].request_ids[0]]))
    rig.finish()
    assert rig.ends["a"].finish_reason == "abort"
    assert rig.tokens["b"] == expected(other, script=PERIODIC)


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


def test_the_only_request_that_may_run_has_chunks() -> None:
    message = add("a", [CUE], max_tokens=20)
    rig = chunked(PERIODIC, max_num_seqs=1)
    assert rig.run(message) == {"a": expected(message, script=PERIODIC)}
    assert any(map(num_guesses, rig.plans))


@pytest.mark.parametrize("made", [drafting, chunked])
def test_a_draft_takes_no_page_from_others(made: Callable[..., Rig]) -> None:
    """Two requests fill the pool to its last page: no request is preempted for a draft."""
    messages = [add(name, [first, CUE], max_tokens=30) for name, first in (("a", 20), ("b", 21))]
    rig = made(PERIODIC, num_blocks=17, block_size=4)
    rig.run(*messages)
    assert rig.scheduler.take_stats().num_preemptions == 0
    assert any(map(num_guesses, rig.plans))
    assert rig.tokens == {message.request_id: expected(message, script=PERIODIC) for message in messages}


def test_drafts_are_rows_beside_a_prompt_that_is_cut_to_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is cut before an image that is not encoded yet."""
    share = PrefillBudget.share

    def share_single_tokens(*arguments: Any, **options: Any) -> Any:
        counts, started = share(*arguments, **options)
        return [min(count, 1) for count in counts], started

    monkeypatch.setattr(PrefillBudget, "share", share_single_tokens)
    messages = [add("a", [CUE], max_tokens=20), add("b", prompt(20), max_tokens=4)]
    rig = drafting(PERIODIC)
    assert rig.run(*messages) == {message.request_id: expected(message, script=PERIODIC) for message in messages}
    plans = [plan for plan in rig.plans if plan.next_token_ids is not None and num_guesses(plan)]
    assert plans
    for plan in plans:
        program = Program("decode", plan.bucket, plan.bucket, plan.block_tables.shape[1], num_slots=8)
        targets = split(pack(plan, program), program, INPUT_FIELDS)["targets"][: plan.num_tokens]
        place = messages[1].prompt_token_ids[int(plan.num_computed_tokens[plan.request_ids.index("b")]) + 1]
        assert dict(zip(plan.request_ids, targets.tolist(), strict=True)) == {"a": 0, "b": place}


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


def test_a_chunk_has_no_alternatives_of_tokens_and_begins_after_the_prompt() -> None:
    messages = [add("a", [CUE], max_tokens=20, num_top_logprobs=2), add("b", [3, CUE], max_tokens=20)]
    rig = chunked(PERIODIC)
    assert rig.run(*messages) == {message.request_id: expected(message, script=PERIODIC) for message in messages}
    chunks = [plan for plan in rig.plans if plan.draft_lengths is not None]
    lengths = {
        name: [int(plan.draft_lengths[plan.request_ids.index(name)]) for plan in chunks if name in plan.request_ids]
        for name in ("a", "b")
    }
    assert not any(lengths["a"]) and any(lengths["b"])
    assert all(plan.slots.min() >= 0 for plan in rig.plans), "no rows of drafts"


def test_chunks_are_left_out_while_they_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then steps overlap as without drafts."""
    monkeypatch.setattr(Payoff, "choose", lambda self, num_rows: "decode")
    message = add("a", [CUE], max_tokens=20)
    rig = chunked(PERIODIC, depth=1)
    assert rig.run(message) == {"a": expected(message, script=PERIODIC)}
    assert not any(map(num_guesses, rig.plans))
    assert sum(int(plan.token_ids[0] == UNREAD_TOKEN) for plan in rig.plans) > len(rig.plans) // 2


def test_chunks_that_take_too_long_are_found_out() -> None:
    """A step that takes as long as a decode step pays whatever it yields, and one that takes much longer does not."""
    payoff, script = {}, Script(cue=CUE, token_ids=(5, 6, 7) * 40)
    for slow in (1.0, 9.0):
        rig = chunked(script)
        rig.send(add("a", [CUE], max_tokens=90), add("b", [3, CUE], max_tokens=90))
        while rig.scheduler.has_work:
            plan = rig.scheduler.schedule()
            assert plan is not None
            seconds = slow if plan.kind == "speculate" else 1.0
            result = rig.executor.submit(plan).result()
            rig.collect(rig.scheduler.update(plan, replace(result, device_seconds=seconds)))
        payoff[slow] = rig.scheduler.take_stats().spec_decode_is_on
    assert payoff == {1.0: 1, 9.0: 0}


def test_log_probabilities_belong_to_the_tokens_of_a_draft() -> None:
    """The alternatives of the fake executor are the token and its successors."""
    rig = drafting(PERIODIC)
    rig.send(add("a", [CUE], max_tokens=20, num_top_logprobs=2))
    listed = []
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        assert plan is not None
        outputs = rig.scheduler.update(plan, rig.executor.submit(plan).result())
        rig.collect(outputs)
        listed += [entry.top_token_ids for output in outputs for entry in output.logprobs or ()]
    assert listed == [[token, token + 1] for token in rig.tokens["a"]]
    assert len(listed) == 20
