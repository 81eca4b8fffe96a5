"""The rules of the scheduler, one by one, on the fake executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.ipc.messages import ErrorInfo
from jaxserve.sampling.params import device_row
from jaxserve.scheduler.plan import NO_TARGET, Buckets
from jaxserve.scheduler.request import Request
from jaxserve.types import NO_LOGPROBS, RequestId
from tests.engine.rig import EOS, Rig, add, expected, prompt

ERROR = ErrorInfo("InternalError", "broken")


def test_decode_steps_use_the_smallest_decode_bucket() -> None:
    rig = Rig()
    rig.send(*[add(f"r{i}", prompt(2, i + 3), max_tokens=3) for i in range(5)])
    first, second = rig.step(), rig.step()
    assert first is not None
    assert second is not None
    assert (first.kind, first.bucket) == ("mixed", 16)
    assert (second.kind, second.bucket) == ("decode", 8)
    assert second.num_padding_tokens == 3


def test_slot_is_initialised_once_and_only_for_a_request_that_needs_it() -> None:
    rig = Rig(max_num_batched_tokens=8)
    messages = [add("plain", prompt(3), max_tokens=6), add("biased", prompt(9), max_tokens=3, logit_bias={5: 1.0})]
    rig.send(*messages)
    while rig.scheduler.has_work:
        rig.step()
    inits = [(step, init) for step, plan in enumerate(rig.plans) for init in plan.slot_inits]
    assert [(step, init.sampling) for step, init in inits] == [(0, messages[1].sampling)]
    assert rig.rows(rig.plans[0]) == {"plain": 3, "biased": 5}


def test_slot_of_a_preempted_request_is_initialised_again_with_all_its_tokens() -> None:
    rig = Rig(num_blocks=11)
    messages = [add(f"r{i}", prompt(8, i + 3), max_tokens=16, frequency_penalty=1.0) for i in range(3)]
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    inits = [init for plan in rig.plans for init in plan.slot_inits]
    assert len(inits) > 3, "a preemption was meant"
    assert all(init.num_prompt_tokens == 8 for init in inits)
    again = inits[-1].token_ids.tolist()
    assert any(again == (message.prompt_token_ids + expected(message))[: len(again)] for message in messages)


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_prompts_are_computed_once(depth: int) -> None:
    """The choices of `n` have equal prompts: the others start when the pages of the first are published."""
    rig = Rig(num_blocks=65, max_num_batched_tokens=16, depth=depth)
    messages = [add(f"r{i}", prompt(42), max_tokens=4, temperature=1.0, seed=i) for i in range(5)]
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert [rig.ends[f"r{i}"].num_cached_tokens for i in range(5)] == [0, 40, 40, 40, 40]
    num_prefilled = sum(plan.num_scheduled_tokens[~plan.is_sampling].sum() for plan in rig.plans)
    assert num_prefilled == 32, "the first two chunks of one prompt; every other step samples for all of its rows"


def test_no_request_waits_for_a_prompt_with_a_different_end() -> None:
    rig = Rig(max_num_batched_tokens=64)
    rig.send(
        add("one", prompt(12)),
        add("longer", [*prompt(12), 3, 4, 5, 6, 7]),
        add("other", [*prompt(4), 1, 1, 1, 1, 1, 1, 1, 1]),
    )
    assert rig.rows(rig.step()) == {"one": 12, "longer": 17, "other": 12}


def test_equal_prompt_starts_when_the_one_it_waited_for_is_aborted() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.send(add("first", prompt(20)), add("second", prompt(20), max_tokens=2))
    assert rig.rows(rig.step()) == {"first": 8}
    rig.scheduler.abort([RequestId("first")])
    assert rig.rows(rig.step()) == {"second": 8}
    rig.finish()
    assert rig.ends["second"].num_cached_tokens == 8


def test_mixed_step_puts_decode_rows_first_then_chunks() -> None:
    rig = Rig(scheduling_policy="priority")
    rig.send(add("long", prompt(40), max_tokens=2))
    rig.step()
    rig.send(add("one", [5], max_tokens=9), add("short", prompt(3, 9), max_tokens=2))
    assert rig.rows(rig.step()) == {"long": 16}
    assert rig.rows(rig.step()) == {"long": 8, "one": 1, "short": 3}
    assert rig.plans[-1].request_ids == ("one", "long", "short")
    assert rig.plans[-1].kind == "mixed"
    assert rig.plans[-1].is_sampling.tolist() == [True, True, True]


def test_plan_names_the_token_after_a_chunk_that_ends_inside_a_prompt() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.run(add("a", prompt(20), max_tokens=3))
    found = [None if plan.next_token_ids is None else plan.next_token_ids.tolist() for plan in rig.plans]
    assert found[:3] == [[prompt(20)[8]], [prompt(20)[16]], None]
    assert set(map(str, found[3:])) == {"None"}


def test_rows_that_sample_have_no_known_next_token() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.run(add("a", prompt(3), max_tokens=9), add("b", prompt(20, 4), max_tokens=3))
    mixed = [plan for plan in rig.plans if plan.next_token_ids is not None]
    assert mixed
    for plan in mixed:
        assert plan.next_token_ids is not None
        assert ((plan.next_token_ids == NO_TARGET) == plan.is_sampling).all()


def test_plan_has_the_state_of_each_row() -> None:
    rig = Rig(max_num_batched_tokens=8)
    message = add("r", prompt(11), max_tokens=2, temperature=0.5, seed=7, top_k=3)
    rig.send(message)
    first, second = rig.step(), rig.step()
    assert first is not None
    assert second is not None
    assert first.token_ids.tolist() == message.prompt_token_ids[:8]
    assert first.is_sampling.tolist() == [False]
    assert second.token_ids.tolist() == message.prompt_token_ids[8:]
    assert (second.num_computed_tokens.tolist(), second.num_scheduled_tokens.tolist()) == ([8], [3])
    assert second.is_sampling.tolist() == [True]
    assert second.block_tables.shape == (1, 32)
    assert (second.block_tables[0, :3] > 0).all()
    assert (second.block_tables[0, 3:] == 0).all()
    assert np.array_equal(second.sampling[0], device_row(message.sampling))


@pytest.mark.parametrize("chunk", [2, 3, 5, 16, 64])
def test_any_chunk_size_gives_the_tokens_of_one_shot(chunk: int) -> None:
    message = add("r", prompt(37), max_tokens=6)
    assert Rig(max_num_seqs=2, max_num_batched_tokens=chunk).run(message) == {"r": expected(message)}


def test_batch_gives_the_tokens_of_single_requests() -> None:
    messages = [
        add(f"r{i}", prompt(1 + 3 * i, i + 3), max_tokens=1 + i, temperature=i % 2, seed=i, num_top_logprobs=i % 3)
        for i in range(16)
    ]
    assert Rig().run(*messages) == {message.request_id: expected(message) for message in messages}


def test_running_requests_move_every_step_beside_a_long_prompt() -> None:
    rig = Rig()
    rig.send(add("decoding", prompt(3), max_tokens=20))
    rig.step()
    rig.send(add("long", prompt(100, 9), max_tokens=2))
    while "long" not in rig.tokens:
        assert rig.rows(rig.step())["decoding"] == 1


def test_first_come_first_served() -> None:
    rig = Rig(max_num_seqs=2)
    rig.run(*[add(f"r{i}", prompt(9, i + 3), max_tokens=4) for i in range(6)])
    assert list(rig.ends) == [f"r{i}" for i in range(6)]


def test_lower_priority_value_goes_first_then_arrival() -> None:
    rig = Rig(max_num_seqs=1)
    rig.run(
        *[
            add(name, prompt(4, i + 3), priority=p)
            for i, (name, p) in enumerate([("c", 1), ("a", -1), ("d", 1), ("b", 0)])
        ]
    )
    assert list(rig.ends) == ["a", "b", "c", "d"]


def test_limits_are_clamped_to_the_buckets() -> None:
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=64, buckets=Buckets((1, 2), (4, 8), 4))
    messages = [add(f"r{i}", prompt(11, i + 3), max_tokens=3) for i in range(4)]
    assert rig.run(*messages) == {message.request_id: expected(message) for message in messages}
    assert max(len(plan.request_ids) for plan in rig.plans) == 2
    assert max(plan.num_tokens for plan in rig.plans) == 8


# --- finishing ------------------------------------------------------------------------------------------


def first_token(message_prompt: list[int]) -> int:
    return expected(add("x", message_prompt, max_tokens=1))[0]


EOS_PROMPT = next([n] for n in range(3, 101) if first_token([n, n]) == EOS) * 2


@pytest.mark.parametrize(
    ("options", "reason", "stop_token_id", "count"),
    [
        ({"max_tokens": 3}, "length", None, 3),
        ({"max_tokens": 3, "ignore_eos": False}, "stop", None, 1),
        ({"max_tokens": 1, "ignore_eos": False}, "stop", None, 1),
        ({"max_tokens": 3, "stop_token_ids": (EOS,)}, "stop", EOS, 1),
        ({"max_tokens": 3, "ignore_eos": False, "stop_token_ids": (EOS,)}, "stop", None, 1),
        ({"max_tokens": 1}, "length", None, 1),
    ],
)
def test_what_ends_a_request(options: dict[str, Any], reason: str, stop_token_id: int | None, count: int) -> None:
    rig = Rig()
    rig.run(add("r", EOS_PROMPT, **options))
    end = rig.ends["r"]
    assert (end.finish_reason, end.stop_token_id, len(rig.tokens["r"])) == (reason, stop_token_id, count)
    assert rig.tokens["r"][0] == EOS


def test_output_is_cut_where_the_context_ends() -> None:
    rig = Rig(max_model_len=20)
    message = add("r", prompt(15), max_tokens=1000)
    assert rig.run(message) == {"r": expected(message, 20)}
    assert len(rig.tokens["r"]) == 5
    assert rig.ends["r"].finish_reason == "length"


def test_request_that_fills_context_and_pool_to_the_last_slot_finishes() -> None:
    rig = Rig(max_model_len=17, num_blocks=5)
    message = add("r", prompt(16), max_tokens=1)
    assert rig.run(message) == {"r": expected(message)}


def test_buffer_of_tokens_grows_past_its_first_size() -> None:
    rig = Rig(max_model_len=1024, num_blocks=260)
    message = add("r", prompt(5), max_tokens=700)
    assert rig.run(message) == {"r": expected(message)}


@pytest.mark.parametrize(("wanted", "most"), [([None, None], NO_LOGPROBS), ([None, 0], 0), ([3, 0], 3)])
def test_plan_asks_for_the_largest_number_of_logprobs_of_a_row(wanted: list[int | None], most: int) -> None:
    rig = Rig()
    rig.send(*(add(str(i), prompt(3, i), num_top_logprobs=number) for i, number in enumerate(wanted)))
    plan = rig.scheduler.schedule()
    assert plan is not None and plan.num_top_logprobs == most


def test_logprobs_come_with_as_many_alternatives_as_asked() -> None:
    rig = Rig()
    rig.send(
        add("none", prompt(3)),
        add("own", prompt(3, 4), num_top_logprobs=0),
        add("two", prompt(3, 5), num_top_logprobs=2),
    )
    plan = rig.scheduler.schedule()
    assert plan is not None
    assert plan.num_top_logprobs == 2
    outputs = {o.request_id: o for o in rig.scheduler.update(plan, rig.executor.submit(plan).result())}
    assert outputs[RequestId("none")].logprobs is None
    own, two = outputs[RequestId("own")].logprobs, outputs[RequestId("two")].logprobs
    assert own is not None
    assert two is not None
    assert (own[0].logprob, own[0].top_token_ids, own[0].top_logprobs) == (-1.0, [], [])
    token = outputs[RequestId("two")].token_ids[0]
    assert (two[0].top_token_ids, two[0].top_logprobs) == ([token, (token + 1) % 101], [-1.0, -2.0])


# --- prefix cache ---------------------------------------------------------------------------------------


def test_prefix_hit_gives_the_tokens_of_a_cold_run() -> None:
    rig = Rig()
    first, second = add("first", prompt(18), max_tokens=5), add("second", [*prompt(14), 50, 51, 52], max_tokens=5)
    rig.run(first)
    rig.run(second)
    assert rig.tokens == {"first": expected(first), "second": expected(second)}
    assert (rig.ends["first"].num_cached_tokens, rig.ends["second"].num_cached_tokens) == (0, 12)


def test_fully_cached_prompt_still_computes_its_last_page() -> None:
    rig = Rig()
    rig.run(add("cold", prompt(16), max_tokens=4))
    message = add("hot", prompt(16), max_tokens=4)
    rig.send(message)
    assert rig.rows(rig.step()) == {"hot": 4}
    rig.finish()
    assert rig.tokens["hot"] == expected(message)
    assert rig.ends["hot"].num_cached_tokens == 12


def test_generated_tokens_are_cached_for_the_next_turn_of_a_chat() -> None:
    rig = Rig()
    first = add("turn1", prompt(6), max_tokens=8)
    answer = rig.run(first)["turn1"]
    rig.run(add("turn2", [*prompt(6), *answer, 7, 8], max_tokens=2))
    assert rig.ends["turn2"].num_cached_tokens == 12


def test_waiting_request_asks_the_cache_when_it_starts() -> None:
    rig = Rig(max_num_seqs=1)
    messages = [add("first", prompt(12), max_tokens=3), add("second", prompt(12), max_tokens=3)]
    rig.run(*messages)  # both were added before anything was cached
    assert rig.ends["second"].num_cached_tokens == 8
    assert rig.tokens["second"] == expected(messages[1])


def test_requests_with_different_salts_share_no_pages() -> None:
    rig = Rig()
    rig.run(add("a", prompt(12), salt="a"))
    rig.run(add("b", prompt(12), salt="b"))
    assert rig.ends["b"].num_cached_tokens == 0


def test_reset_prefix_cache_makes_the_next_run_cold() -> None:
    rig = Rig()
    rig.run(add("a", prompt(12)))
    rig.scheduler.reset_prefix_cache()
    rig.run(add("b", prompt(12)))
    assert rig.ends["b"].num_cached_tokens == 0


# --- preemption -----------------------------------------------------------------------------------------


def crowd(**options: Any) -> tuple[Rig, list[str]]:
    """Three requests that fit the pool at first and outgrow it."""
    rig = Rig(num_blocks=13, **options)
    messages = [add(f"r{i}", prompt(6, i + 3), max_tokens=24, temperature=i % 2, seed=i) for i in range(3)]
    rig.send(*messages)
    rig.finish()
    assert rig.tokens == {message.request_id: expected(message) for message in messages}
    return rig, list(rig.ends)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_request_recomputes_same_tokens(enable_prefix_caching: bool) -> None:
    rig, order = crowd(enable_prefix_caching=enable_prefix_caching)
    stats = rig.scheduler.take_stats()
    assert stats.num_preemptions > 0
    assert order == ["r0", "r1", "r2"]
    assert (stats.prompt_tokens, stats.generation_tokens) == (18, 72)
    # Its own pages, found again, do not count as prefix hits.
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 0)
    assert {end.num_cached_tokens for end in rig.ends.values()} == {0}
    assert rig.ends["r0"].num_preemptions == 0, "the first in rank is never preempted"
    assert sum(end.num_preemptions for end in rig.ends.values()) == stats.num_preemptions


def test_queue_seconds_run_from_arrival_to_the_first_step_of_the_request() -> None:
    rig = Rig(max_num_seqs=1)
    rig.now = 100.0
    rig.send(add("first", prompt(3), max_tokens=2), add("second", prompt(3, 9), max_tokens=2))
    for rig.now in (101.0, 102.0, 104.5, 108.0):
        rig.step()
    assert {name: end.queue_seconds for name, end in rig.ends.items()} == {"first": 1.0, "second": 4.5}


def test_queue_seconds_stay_when_a_request_is_preempted() -> None:
    rig = Rig(num_blocks=8)
    rig.send(add("old", prompt(10), max_tokens=16), add("young", prompt(10, 5), max_tokens=8))
    while rig.step() is not None:
        rig.now += 1.0
    assert rig.ends["young"].num_preemptions > 0
    assert {end.queue_seconds for end in rig.ends.values()} == {0.0}


def test_end_without_a_token_reports_preemptions() -> None:
    rig = Rig(num_blocks=8)
    rig.send(add("old", prompt(10), max_tokens=16), add("young", prompt(10, 5), max_tokens=8))
    while len(rig.rows(rig.step())) == 2:
        pass
    (end,) = rig.scheduler.abort([RequestId("young")])
    assert (end.num_preemptions, end.queue_seconds) == (1, 0.0)


def test_youngest_is_preempted_and_continues_before_newer_requests() -> None:
    rig = Rig(num_blocks=8)
    rig.send(add("old", prompt(10), max_tokens=16), add("young", prompt(10, 5), max_tokens=8))
    while len(rig.rows(rig.step())) == 2:
        pass
    assert rig.rows(rig.plans[-1]) == {"old": 1}
    rig.send(add("new", prompt(3, 9), max_tokens=2))
    preempted_at = len(rig.plans)
    rig.finish()
    first_row: dict[str, int] = {}
    for i, plan in enumerate(rig.plans[preempted_at:]):
        for request_id in plan.request_ids:
            first_row.setdefault(request_id, i)
    assert 0 == first_row["old"] < first_row["young"] <= first_row["new"]


def test_a_full_data_rank_preempts_its_own_last_request() -> None:
    rig = Rig(num_blocks=16, num_ranks=2)
    messages = [
        add(name, prompt(4, first), max_tokens=count)
        for name, first, count in [("a", 1, 16), ("b", 9, 4), ("c", 5, 16), ("d", 7, 16)]
    ]
    rig.send(*messages)
    rig.finish()
    assert rig.tokens == {message.request_id: expected(message) for message in messages}
    assert [name for name, end in rig.ends.items() if end.num_preemptions] == ["c"]


def test_preempted_request_restarts_in_a_later_step_even_if_it_would_fit_at_once() -> None:
    """Twins compute equal pages side by side; after preemption the younger one can share those of the older."""
    rig = Rig(num_blocks=8)
    old, young = add("old", prompt(4), max_tokens=16), add("young", prompt(4), max_tokens=16)
    rig.send(old, young)
    while len(rig.rows(rig.step())) == 2:
        pass
    assert rig.rows(rig.plans[-1]) == {"old": 1}
    assert rig.rows(rig.step()) == {"old": 1, "young": 1}
    rig.finish()
    assert rig.tokens == {"old": expected(old), "young": expected(young)}


def test_new_request_leaves_a_spare_page_for_each_running_request() -> None:
    rig = Rig(num_blocks=6)
    rig.send(add("old", prompt(8), max_tokens=4), add("new", prompt(12, 9), max_tokens=2))
    for _ in range(4):
        assert rig.rows(rig.step()).keys() == {"old"}  # three pages free, three wanted, one of them is old's next
    assert rig.rows(rig.step()) == {"new": 12}
    assert rig.scheduler.take_stats().num_preemptions == 0


def test_preemption_hits_the_lowest_priority_even_if_it_came_first() -> None:
    rig = Rig(num_blocks=8)
    rig.send(add("low", prompt(10), max_tokens=16, priority=1), add("high", prompt(10, 5), max_tokens=16))
    rig.finish()
    assert list(rig.ends) == ["high", "low"]
    assert rig.scheduler.take_stats().num_preemptions > 0


def test_limits_are_those_of_the_buckets_without_smaller_settings() -> None:
    rig = Rig(max_num_seqs=None, max_num_batched_tokens=None, buckets=Buckets((1, 2, 4), (4, 16), 4))
    rig.send(*[add(f"r{i}", prompt(2, i + 3), max_tokens=3) for i in range(5)], add("long", prompt(40, 9)))
    assert rig.rows(rig.step()) == {f"r{i}": 2 for i in range(4)}
    rig.finish()
    assert max(plan.num_tokens for plan in rig.plans) == 16


# --- abort, failure, steps in flight --------------------------------------------------------------------


def test_abort_frees_every_page_at_once_waiting_or_running() -> None:
    rig = Rig(max_num_seqs=1)
    rig.send(add("running", prompt(30)), add("waiting", prompt(30, 9)))
    rig.step()
    outputs = rig.scheduler.abort([RequestId(name) for name in ("waiting", "running", "unknown", "running")])
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("waiting", "abort"), ("running", "abort")]
    assert rig.kv.usage == 0.0
    assert not rig.scheduler.has_work
    assert rig.step() is None


def test_removing_a_request_does_not_scan_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand requests may wait: aborting them must not block the engine for minutes."""
    compared: list[object] = []
    monkeypatch.setattr(Request, "__eq__", lambda self, other: compared.append(other) or self is other, raising=False)
    rig = Rig(max_num_seqs=4)
    rig.send(*[add(f"r{i}", prompt(3, i + 3)) for i in range(16)])
    rig.step()
    ended = [RequestId(f"r{i}") for i in (15, 2, 9, 3)]
    assert [output.request_id for output in rig.scheduler.abort(ended)] == ended
    assert [request.request_id for request in rig.scheduler.running] == ["r0", "r1"]
    assert [request.request_id for request in rig.scheduler.waiting] == [f"r{i}" for i in range(4, 15) if i != 9]
    assert compared == []


def test_pages_of_a_request_aborted_in_flight_are_free_when_its_step_is_done() -> None:
    rig = Rig()
    rig.send(add("r", prompt(7)), add("other", prompt(3, 9), max_tokens=2))
    plan = rig.scheduler.schedule()
    assert plan is not None
    (end,) = rig.scheduler.abort([RequestId("r")])
    assert end.finish_reason == "abort"
    held = rig.kv.usage
    outputs = rig.scheduler.update(plan, rig.executor.submit(plan).result())
    assert [output.request_id for output in outputs] == ["other"]
    assert rig.kv.usage < held
    rig.finish()


def test_result_of_an_aborted_request_does_not_reach_a_new_one_of_the_same_id() -> None:
    rig = Rig()
    rig.send(add("r", prompt(3)))
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.scheduler.abort([RequestId("r")])
    again = add("r", prompt(5, 9), max_tokens=4)
    rig.send(again)
    assert rig.scheduler.update(plan, rig.executor.submit(plan).result()) == []
    rig.finish()
    assert rig.tokens == {"r": expected(again)}


def test_failed_step_ends_its_requests_only_and_forgets_cached_pages() -> None:
    rig = Rig(max_num_seqs=1)
    rig.run(add("before", prompt(12)))
    after = add("after", prompt(12), max_tokens=3)
    rig.send(add("victim", prompt(12), max_tokens=9), after)
    rig.step()
    plan = rig.scheduler.schedule()
    assert plan is not None
    rig.collect(rig.scheduler.fail(plan, ERROR))
    assert (rig.ends["victim"].finish_reason, rig.ends["victim"].error) == ("error", ERROR)
    rig.finish()
    assert rig.tokens["after"] == expected(after)
    assert rig.ends["after"].num_cached_tokens == 0


def test_plans_are_answered_in_their_order() -> None:
    rig = Rig()
    rig.send(add("r", prompt(3)))
    first, second = rig.scheduler.schedule(), rig.scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(RuntimeError, match="not the oldest step in flight"):
        rig.scheduler.fail(second, ERROR)
    rig.scheduler.fail(first, ERROR)
    with pytest.raises(RuntimeError, match="not the oldest step in flight"):
        rig.scheduler.fail(first, ERROR)


def test_abort_all_ends_every_request_with_the_error() -> None:
    rig = Rig(max_num_seqs=1)
    rig.send(add("a", prompt(3)), add("b", prompt(3, 9)))
    rig.step()
    assert {(o.request_id, o.error) for o in rig.scheduler.abort_all(ERROR)} == {("a", ERROR), ("b", ERROR)}
    rig.finish()


def test_stats_hold_gauges_and_increments() -> None:
    rig = Rig(max_num_seqs=1)
    rig.send(add("a", prompt(8), max_tokens=2), add("b", prompt(8), max_tokens=2))
    rig.step()
    stats = rig.scheduler.take_stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    assert stats.kv_cache_usage_perc == pytest.approx(2 / 64)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8, 0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (8, 1)
    rig.finish()
    stats = rig.scheduler.take_stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage_perc) == (0, 0, 0.0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8, 4)
    assert (stats.prompt_tokens, stats.generation_tokens) == (8, 3)
