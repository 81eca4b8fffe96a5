"""Steps in flight and multi-step decode: plans made before earlier results are read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxserve.ipc.messages import AddRequest, ErrorInfo
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, UNREAD_TOKEN, StepPlan
from jaxserve.types import RequestId
from tests.engine.rig import EOS, Rig, add, expected, prompt

ERROR = ErrorInfo("InternalError", "broken")


def mix() -> list[AddRequest]:
    """Greedy and seeded, ends by EOS, stop id and length, short and chunked prompts, a shared prefix."""
    messages = []
    for i in range(24):
        options: dict[str, Any] = {"temperature": i % 2, "seed": i, "max_tokens": 1 + 5 * i % 37}
        if i % 3 == 0:
            options["ignore_eos"] = False
        message = add(f"r{i}", prompt(1 + 7 * i % 45, 3 if i % 4 == 0 else i), **options)
        if i % 5 == 1:
            stop_at = expected(message)[len(expected(message)) // 2]
            message = add(message.request_id, message.prompt_token_ids, **options, stop_token_ids=(stop_at,))
        messages.append(message)
    return messages


@pytest.mark.parametrize(("depth", "max_decode_steps"), [(0, 1), (1, 1), (2, 1), (0, 8), (1, 8), (1, 3)])
@pytest.mark.parametrize("num_blocks", [65, 17])
@pytest.mark.parametrize("shows_tokens", [False, True])
def test_tokens_are_the_same_however_steps_overlap(
    depth: int, max_decode_steps: int, num_blocks: int, shows_tokens: bool
) -> None:
    rig = Rig(depth=depth, max_decode_steps=max_decode_steps, num_blocks=num_blocks, shows_tokens=shows_tokens)
    messages = [message for message in mix() if len(message.prompt_token_ids) + message.sampling.max_tokens < 60]
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    reasons = {end.finish_reason for end in rig.ends.values()}
    assert reasons == {"stop", "length"}
    assert (rig.scheduler.take_stats().num_preemptions > 0) == (num_blocks == 17)
    assert (max(plan.num_steps for plan in rig.plans) > 1) == (max_decode_steps > 1)
    assert any(UNREAD_TOKEN in plan.token_ids for plan in rig.plans) == (depth > 0)
    assert (rig.num_shown > 0) == (shows_tokens and max_decode_steps > 1)


def in_flight(rig: Rig) -> StepPlan:
    """Submit one more step."""
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.pending.append((plan, rig.executor.submit(plan)))
    return plan


def test_next_plan_continues_from_the_unread_token() -> None:
    rig = Rig()
    rig.send(add("r", prompt(3), max_tokens=9))
    first, second = in_flight(rig), in_flight(rig)
    assert second.token_ids.tolist() == [UNREAD_TOKEN]
    assert second.num_computed_tokens.tolist() == [3]
    assert second.slots.tolist() == first.slots.tolist()
    rig.finish()


def test_request_that_ends_by_its_length_is_not_planned_past_its_end() -> None:
    rig = Rig(depth=1)
    rig.run(add("r", prompt(3), max_tokens=4), add("context", prompt(120, 9), max_tokens=1000))
    rows = [request_id for plan in rig.plans for request_id in plan.request_ids]
    assert rows.count(RequestId("r")) == 4


def test_request_that_ends_by_a_token_costs_one_more_row_whose_result_is_dropped() -> None:
    message = add("r", prompt(4), max_tokens=60)
    tokens = expected(message)
    stopped = add("r", prompt(4), max_tokens=60, stop_token_ids=(tokens[7],))
    num_tokens = len(expected(stopped))
    rig = Rig(depth=1)
    rig.run(stopped)
    assert rig.tokens["r"] == tokens[:num_tokens]
    assert len(rig.plans) == num_tokens + 1


def test_pages_of_a_finished_request_are_kept_while_a_step_may_write_them() -> None:
    message = add("r", prompt(4), max_tokens=60)
    rig = Rig(depth=1)
    rig.send(add("r", prompt(4), max_tokens=60, stop_token_ids=(expected(message)[0],)))
    in_flight(rig), in_flight(rig)
    rig.land()
    assert "r" in rig.ends
    assert rig.kv.usage > 0.0
    assert rig.scheduler.has_work
    rig.land()
    assert rig.kv.usage == 0.0
    assert not rig.scheduler.has_work


def test_slot_is_free_for_another_request_before_the_old_ones_last_step_is_done() -> None:
    message = add("old", prompt(4), max_tokens=60)
    new = add("new", prompt(9, 5), max_tokens=6)
    rig = Rig(max_num_seqs=1, depth=1)
    rig.send(add("old", prompt(4), max_tokens=60, stop_token_ids=(expected(message)[0],)), new)
    old_plan = in_flight(rig)
    in_flight(rig)
    rig.land()
    assert in_flight(rig).slots.tolist() == old_plan.slots.tolist()
    rig.finish()
    assert rig.tokens["new"] == expected(new)


def test_no_request_is_preempted_while_a_step_is_in_flight() -> None:
    rig = Rig(num_blocks=8)
    old, young = add("old", prompt(10), max_tokens=16), add("young", prompt(10, 5), max_tokens=8)
    rig.send(old, young)
    while (plan := rig.scheduler.schedule()) is not None:
        rig.pending.append((plan, rig.executor.submit(plan)))
        if len(rig.pending) > 1:
            rig.land()
    assert rig.pending, "the pool was meant to run dry"
    assert len(rig.scheduler.running) == 2
    rig.land()
    assert rig.rows(rig.step()) == {"old": 1}
    rig.finish()
    assert rig.tokens == {"old": expected(old), "young": expected(young)}


def test_prefix_is_shared_only_when_the_step_that_computes_it_is_done() -> None:
    rig = Rig(max_num_batched_tokens=64)
    rig.send(add("first", prompt(12), max_tokens=5))
    in_flight(rig)
    rig.send(add("second", prompt(12), max_tokens=5))
    assert rig.rows(in_flight(rig)) == {"first": 1}, "its pages are not published yet"
    rig.land()
    assert rig.rows(in_flight(rig)) == {"first": 1, "second": 4}
    rig.finish()
    assert rig.tokens["first"] == rig.tokens["second"]


def test_chunk_in_flight_is_not_published() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.send(add("long", prompt(40), max_tokens=2))
    in_flight(rig), in_flight(rig)
    rig.land()
    assert len(rig.kv.find_prefix(rig.kv.new_table(None), np.array(prompt(40), np.int32))) == 4
    rig.finish()


def test_requests_of_later_steps_in_flight_are_computed_again_with_those_of_a_failed_step() -> None:
    rig = Rig(max_num_seqs=2)
    waiting, other = add("waiting", prompt(5, 9), max_tokens=4), add("b", prompt(3, 5), max_tokens=9)
    rig.send(add("a", prompt(3), max_tokens=9))
    first = in_flight(rig)
    rig.send(other, waiting)
    in_flight(rig)
    rig.collect(rig.scheduler.fail(first, ERROR))
    rig.executor.lose_state()
    rig.pending.clear()
    assert {name: end.error for name, end in rig.ends.items()} == {"a": ERROR}, "it was alone in its step"
    assert rig.kv.usage == 0.0
    rig.finish()
    assert rig.tokens["waiting"] == expected(waiting)
    assert rig.tokens["b"] == expected(other)


def test_end_on_the_device_only_raises() -> None:
    rig = Rig()
    rig.send(add("r", prompt(3), max_tokens=9))
    plan = rig.scheduler.schedule()
    assert plan is not None
    result = rig.executor.submit(plan).result()
    result.token_ids[:] = UNREAD_TOKEN
    with pytest.raises(RuntimeError, match="the device ended r, which is not finished"):
        rig.scheduler.update(plan, result)


# --- stops on the device --------------------------------------------------------------------------------


def test_plan_has_the_ids_that_end_a_request() -> None:
    rig = Rig()
    rig.send(
        add("plain", prompt(2), max_tokens=5, ignore_eos=False),
        add("ids", prompt(3, 5), max_tokens=6, stop_token_ids=(7, 9)),
        add("many", prompt(4, 7), max_tokens=7, ignore_eos=False, stop_token_ids=tuple(range(50, 70))),
    )
    plan = rig.step()
    assert plan is not None
    rows = dict(zip(plan.request_ids, plan.stop_token_ids.tolist(), strict=True))
    unused = [-1] * MAX_STOP_TOKENS
    assert rows[RequestId("plain")] == [EOS, *unused[1:]]
    assert rows[RequestId("ids")] == [7, 9, *unused[2:]]
    assert rows[RequestId("many")] == [EOS, *range(50, 50 + MAX_STOP_TOKENS - 1)]
    assert plan.length_limits.tolist() == [7, 9, 11]


def test_stop_id_beyond_those_of_the_device_still_ends_the_request() -> None:
    tokens = expected(add("r", prompt(4), max_tokens=30))
    others = [token for token in range(101) if token not in tokens][: MAX_STOP_TOKENS + 2]
    message = add("r", prompt(4), max_tokens=30, stop_token_ids=(*others, tokens[9]))
    rig = Rig(depth=1, max_decode_steps=8)
    rig.run(message)
    assert rig.tokens["r"] == expected(message)
    assert (rig.ends["r"].finish_reason, rig.ends["r"].stop_token_id) == ("stop", tokens[9])


# --- multi-step decode ----------------------------------------------------------------------------------


def lengths(rig: Rig) -> list[int]:
    return [plan.num_steps for plan in rig.plans]


def test_multi_step_decode_needs_one_call_and_one_message_for_many_tokens() -> None:
    message = add("r", prompt(4), max_tokens=18, num_top_logprobs=0)
    rig = Rig(max_decode_steps=8)
    rig.send(message)
    plan = in_flight(rig)
    rig.land()
    plan = in_flight(rig)
    assert plan.num_steps == 1, "nothing is known of the step time yet"
    rig.land()
    plan = in_flight(rig)
    assert plan.num_steps == 8
    pending = rig.pending.popleft()[1]
    (output,) = rig.scheduler.update(plan, pending.result())
    assert output.token_ids == expected(message)[2:10]
    assert output.logprobs is not None
    assert [entry.logprob for entry in output.logprobs] == [-1.0] * 8


def test_tokens_of_a_call_are_taken_step_by_step_and_the_last_with_its_result() -> None:
    message = add("r", prompt(4), max_tokens=18)
    rig = Rig(max_decode_steps=8, shows_tokens=True)
    rig.send(message)
    for _ in range(2):
        in_flight(rig)
        rig.land()
    plan = in_flight(rig)
    assert plan.num_steps == 8
    (request,) = rig.scheduler.running
    for number in range(2, 9):
        assert rig.show()
        assert rig.tokens["r"] == expected(message)[: number + 1]
        assert request.num_tokens + request.num_unread_tokens == 4 + 10
        assert rig.scheduler.schedule() is None or number, "a plan may be made between two of its steps"
    assert not rig.show()
    rig.land()
    assert rig.tokens["r"] == expected(message)[:10]


def test_a_request_that_ends_in_the_middle_of_a_call_keeps_its_pages_until_the_call_is_done() -> None:
    tokens = expected(add("stops", prompt(4), max_tokens=40))
    rig = Rig(max_decode_steps=8, shows_tokens=True)
    stops = add("stops", prompt(4), max_tokens=40, stop_token_ids=(tokens[4],))
    other = add("other", prompt(4, 9), max_tokens=12)
    assert rig.run(stops, other) == {"stops": tokens[:5], "other": expected(other)}
    assert rig.num_shown > 0


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("options", [{"num_top_logprobs": 0}, {"num_prompt_logprobs": 0}])
def test_tokens_with_log_probabilities_come_with_the_result(options: dict[str, int], has_other: bool) -> None:
    messages = [add("r", prompt(4), max_tokens=18, **options)]
    messages += [add("other", prompt(4, 9), max_tokens=18)] * has_other
    rig = Rig(max_decode_steps=8, shows_tokens=True)
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert (rig.num_shown > 0) == has_other


def test_a_call_that_fails_after_some_of_its_tokens_goes_on_from_them() -> None:
    messages = [add("r", prompt(4), max_tokens=18), add("s", prompt(4, 9), max_tokens=18)]
    rig = Rig(max_decode_steps=8, shows_tokens=True)
    rig.send(*messages)
    for _ in range(2):
        in_flight(rig)
        rig.land()
    plan = in_flight(rig)
    assert rig.show()
    assert rig.show()
    rig.pending.clear()
    rig.collect(rig.scheduler.fail(plan, ERROR))
    rig.executor.lose_state()
    rig.finish()
    assert rig.tokens == {message.request_id: expected(message) for message in messages}


def test_multi_step_decode_never_passes_the_shortest_requests_end() -> None:
    rig = Rig(max_decode_steps=8)
    rig.run(add("short", prompt(4), max_tokens=7), add("long", prompt(4, 9), max_tokens=17))
    assert lengths(rig) == [1, 1, 5, 1, 8, 1]


def test_multi_step_decode_ends_when_any_request_ends_and_the_others_continue() -> None:
    tokens = expected(add("stops", prompt(4), max_tokens=40))
    rig = Rig(max_decode_steps=8)
    stops = add("stops", prompt(4), max_tokens=40, stop_token_ids=(tokens[4],))
    goes_on = add("goes on", prompt(4, 9), max_tokens=40)
    rig.send(stops, goes_on)
    while "stops" not in rig.ends:
        rig.step()
    assert len(rig.tokens["goes on"]) == len(rig.tokens["stops"]) == len(expected(stops))
    rig.finish()
    assert rig.tokens["goes on"] == expected(goes_on)


def test_no_step_is_planned_before_a_multi_step_call_is_read() -> None:
    rig = Rig(max_decode_steps=8)
    rig.send(add("r", prompt(4), max_tokens=40))
    rig.step(), rig.step()
    assert in_flight(rig).num_steps == 8
    assert rig.scheduler.schedule() is None
    rig.finish()


def test_new_request_waits_for_one_multi_step_call_at_most() -> None:
    rig = Rig(max_decode_steps=8, depth=1)
    rig.send(add("old", prompt(4), max_tokens=100))
    while not rig.pending or rig.pending[-1][0].num_steps == 1:
        rig.step()
    num_before = len(rig.tokens["old"])
    rig.send(add("new", prompt(4, 9), max_tokens=9))
    num_in_flight = sum(plan.num_steps for plan, _ in rig.pending)
    while "new" not in rig.tokens:
        rig.step()
    assert num_in_flight <= 8
    assert len(rig.tokens["old"]) - num_before <= num_in_flight + 2
    rig.finish()


def test_single_steps_while_a_request_waits_or_prefills() -> None:
    rig = Rig(max_decode_steps=8, max_num_seqs=1)
    rig.send(add("runs", prompt(4), max_tokens=20), add("waits", prompt(40, 9), max_tokens=20))
    while "runs" not in rig.ends:
        rig.step()
    assert max(lengths(rig)) == 1
    rig.finish()
    assert max(lengths(rig)) == 8


def test_single_steps_for_alternatives_of_tokens() -> None:
    rig = Rig(max_decode_steps=8)
    rig.run(add("r", prompt(4), max_tokens=20, num_top_logprobs=3))
    assert max(lengths(rig)) == 1


def test_single_steps_when_the_pool_has_no_pages_for_more() -> None:
    rig = Rig(max_decode_steps=8, num_blocks=6)
    rig.send(add("r", prompt(16), max_tokens=4))
    rig.step(), rig.step()
    held = rig.kv.usage
    rig.send(add("waits", prompt(12, 9), max_tokens=2))
    rig.step()
    assert rig.kv.usage == held
    rig.finish()


@pytest.mark.parametrize(("device_seconds", "longest"), [(0.0, 8), (0.011, 4), (0.06, 1)])
def test_multi_step_call_lasts_no_longer_than_the_limit(device_seconds: float, longest: int) -> None:
    rig = Rig(max_decode_steps=8, max_burst_ms=50.0)
    message = add("r", prompt(4), max_tokens=40)
    rig.send(message)
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        assert plan is not None
        rig.plans.append(plan)
        result = rig.executor.submit(plan).result()
        timed = dataclasses.replace(result, device_seconds=device_seconds * result.num_steps)
        rig.collect(rig.scheduler.update(plan, timed))
    assert rig.tokens["r"] == expected(message)
    assert max(lengths(rig)) == longest


def test_multi_step_decode_can_be_switched_off() -> None:
    rig = Rig(max_decode_steps=8, max_burst_ms=0.0)
    rig.run(add("r", prompt(4), max_tokens=20))
    assert max(lengths(rig)) == 1
