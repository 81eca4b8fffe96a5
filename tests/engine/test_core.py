"""The engine core: one terminal message per request in every case."""

from __future__ import annotations

import random

import pytest

from jaxserve.engine.core import BROKEN_ERROR, MEMORY_ERROR, STEP_ERROR, STOP_ERROR, EngineCore
from jaxserve.executor.fake.executor import FakePending
from jaxserve.executor.protocol import BrokenExecutorError
from jaxserve.ipc.messages import Abort, Hello, RequestOutput
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.types import RequestId
from tests.engine.rig import Rig, add, expected, prompt


def turn(rig: Rig) -> bool:
    """Run one step of the core; returns False if nothing is left to do."""
    step = rig.core.step()
    if step is not None:
        rig.collect(step.outputs)
    return rig.core.has_work


both_depths = pytest.mark.parametrize("depth", [0, 1])


def test_step_without_work_is_none() -> None:
    assert Rig().core.step() is None


def test_rejected_request_ends_at_once_in_one_terminal_message() -> None:
    (end,) = Rig().core.handle(add("r", []))
    assert (end.request_id, end.finish_reason, end.token_ids) == ("r", "error", [])
    assert end.error is not None
    assert end.error.error_class == "InvalidRequestError"


@both_depths
def test_request_that_breaks_the_scheduler_ends_alone(depth: int) -> None:
    rig = Rig(depth=depth)
    good = add("good", prompt(3), max_tokens=2)
    rig.send(good)
    bad = add("bad", prompt(3), seed=2**40)  # cannot come over the wire: the codec checks ranges
    (end,) = rig.core.handle(bad)
    assert (end.finish_reason, end.error) == ("error", STEP_ERROR)
    while turn(rig):
        pass
    assert rig.tokens == {"good": expected(good)}


@both_depths
def test_failed_step_ends_its_requests_with_a_fixed_text_and_the_engine_continues(depth: int) -> None:
    rig = Rig(max_num_seqs=1, fail_at_steps=frozenset({1}), depth=depth)
    after = add("after", prompt(3, 9), max_tokens=3)
    rig.send(add("victim", prompt(3), max_tokens=9), after)
    while turn(rig):
        pass
    assert rig.ends["victim"].error == STEP_ERROR
    assert "as told" not in STEP_ERROR.message
    assert rig.tokens["after"] == expected(after)
    assert not rig.core.is_broken
    assert rig.kv.usage == 0.0


@both_depths
def test_an_executor_that_is_broken_breaks_the_engine_with_its_first_step(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(max_num_seqs=1, depth=depth)

    def fail(plan: object) -> None:
        raise BrokenExecutorError("host 1 is gone")

    monkeypatch.setattr(rig.executor, "submit", fail)
    rig.send(add("victim", prompt(3), max_tokens=9))
    while not rig.core.is_broken and turn(rig):
        pass
    assert rig.core.is_broken
    assert rig.ends["victim"].error == BROKEN_ERROR, (
        "with its code, by which a request without output waits for the next engine"
    )


def test_an_executor_that_breaks_in_a_command_breaks_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other hosts start again: an engine that went on would wait for them in its next step."""
    rig = Rig()

    def fail() -> None:
        raise BrokenExecutorError("host 1 is gone")

    monkeypatch.setattr(rig.core._profiler, "start", fail)
    assert rig.core.run_command("start_profile") == BROKEN_ERROR
    assert rig.core.is_broken


@pytest.mark.parametrize(
    ("steps", "depth", "is_broken"),
    [({1, 2}, 0, True), ({1, 3}, 0, False), ({1, 2}, 1, False), ({1, 3}, 1, True), ({1, 4}, 1, False)],
)
def test_two_failed_steps_in_a_row_break_the_engine(steps: set[int], depth: int, is_broken: bool) -> None:
    """With overlap, step 2 is in flight when step 1 fails, and is lost with it: that is one failure."""
    rig = Rig(max_num_seqs=1, fail_at_steps=frozenset(steps), depth=depth)
    rig.send(*[add(f"r{i}", prompt(3, i + 3), max_tokens=9) for i in range(4)])
    while not rig.core.is_broken and turn(rig):
        pass
    assert rig.core.is_broken is is_broken


@both_depths
@pytest.mark.parametrize("max_decode_steps", [1, 4])
def test_one_request_that_fails_ends_alone_and_the_others_get_the_same_tokens(
    depth: int, max_decode_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(depth=depth, max_decode_steps=max_decode_steps)
    compute, failures = rig.model.compute, []

    def compute_or_fail(plan: StepPlan) -> StepResult:
        rows = plan.request_ids.index("r5") if "r5" in plan.request_ids else None
        if rows is not None and plan.num_computed_tokens[rows] >= 8:
            failures.append(plan.request_ids)
            raise RuntimeError("bad luck")
        return compute(plan)

    monkeypatch.setattr(rig.model, "compute", compute_or_fail)
    messages = [
        add(f"r{i}", prompt(3 + i, i), max_tokens=12, temperature=i % 2, presence_penalty=i % 3 / 2, seed=i)
        for i in range(8)
    ]
    rig.send(*messages)
    while turn(rig):
        pass
    late = add("late", prompt(5, 40), max_tokens=3)
    rig.send(late)
    while turn(rig):
        pass
    assert rig.ends["r5"].error == STEP_ERROR
    assert 1 < len(failures) <= 1 + 3, "halves of 8"
    for message in (*messages, late):
        if message.request_id != "r5":
            assert rig.tokens[message.request_id] == expected(message), message.request_id
            assert rig.ends[message.request_id].finish_reason == "length"
    assert rig.kv.usage == 0.0


@both_depths
def test_a_failure_that_does_not_come_back_ends_no_request(depth: int) -> None:
    rig = Rig(fail_at_steps=frozenset({4}), depth=depth)
    messages = [add(f"r{i}", prompt(3 + i, i), max_tokens=9) for i in range(4)]
    rig.send(*messages)
    while turn(rig):
        pass
    assert rig.tokens == {message.request_id: expected(message) for message in messages}


@both_depths
def test_after_an_out_of_memory_error_steps_are_smaller_until_no_request_is_left(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(depth=depth)
    compute = rig.model.compute
    ran: list[tuple[str, int]] = []

    def compute_or_fail(plan: StepPlan) -> StepResult:
        if plan.bucket > 4:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")
        ran.append((plan.kind, plan.bucket))
        return compute(plan)

    monkeypatch.setattr(rig.model, "compute", compute_or_fail)
    messages = [add(f"r{i}", prompt(9, i), max_tokens=5) for i in range(6)]
    rig.send(*messages)
    while turn(rig):
        pass
    assert rig.tokens == {message.request_id: expected(message) for message in messages}
    assert {end.finish_reason for end in rig.ends.values()} == {"length"}
    assert {kind for kind, _ in ran} == {"decode", "mixed"}
    monkeypatch.setattr(rig.model, "compute", compute)
    rig.send(add("after", prompt(9, 60), max_tokens=1))
    plan = rig.scheduler.schedule()
    assert plan is not None and plan.bucket == 16, "all programs again"


@both_depths
def test_device_out_of_memory_is_a_503(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(depth=depth)

    def exhausted(plan: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")

    monkeypatch.setattr(rig.executor, "submit", exhausted)
    rig.send(add("r", prompt(3)))
    while turn(rig):
        pass
    assert rig.ends["r"].error == MEMORY_ERROR
    assert MEMORY_ERROR.error_class == "UnavailableError"


def test_step_that_could_not_be_dispatched_spares_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(max_num_seqs=2, depth=1)
    last, victim = add("last token", prompt(3), max_tokens=2), add("victim", prompt(3, 5), max_tokens=9)
    rig.send(last, victim)
    assert rig.core.step() is None
    assert turn(rig)
    submit = rig.executor.submit

    def refuse_once(plan: object) -> None:
        monkeypatch.setattr(rig.executor, "submit", submit)
        raise RuntimeError("no room for one more")

    monkeypatch.setattr(rig.executor, "submit", refuse_once)
    assert not turn(rig)
    assert rig.tokens["last token"] == expected(last)
    assert rig.ends["last token"].finish_reason == "length"
    assert rig.ends["victim"].error == STEP_ERROR
    assert rig.tokens["victim"] == expected(victim)[:2]


def test_next_step_is_dispatched_before_the_last_one_is_read() -> None:
    rig = Rig(depth=1)
    events: list[str] = []
    submit, update = rig.executor.submit, rig.scheduler.update

    def noted_submit(plan: StepPlan) -> FakePending[StepPlan, StepResult]:
        events.append("dispatch")
        return submit(plan)

    def noted_update(plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        events.append("read")
        return update(plan, result)

    rig.executor.submit = noted_submit  # type: ignore[method-assign]
    rig.scheduler.update = noted_update  # type: ignore[method-assign]
    rig.send(add("r", prompt(3), max_tokens=4))
    while turn(rig):
        pass
    assert events == ["dispatch", "dispatch", "read", "dispatch", "read", "dispatch", "read", "read"]


@pytest.mark.parametrize(("depth", "gaps"), [(0, [0.25, 0.25]), (1, [0.0, 0.0])])
def test_gap_is_the_time_from_the_end_of_a_step_to_the_next_dispatch(depth: int, gaps: list[float]) -> None:
    """On a clock that moves by a quarter of a second whenever the host plans."""
    rig = Rig(depth=depth)
    now = 100.0
    core = EngineCore(rig.scheduler, rig.executor, depth=depth, clock=lambda: now)
    schedule = rig.scheduler.schedule

    def slow_schedule() -> StepPlan | None:
        nonlocal now
        now += 0.25
        return schedule()

    rig.scheduler.schedule = slow_schedule  # type: ignore[method-assign]
    rig.executor.would_be_done = lambda pending: False  # type: ignore[method-assign]
    rig.send(add("r", prompt(3), max_tokens=3))
    found: list[float] = []
    while core.has_work:
        step = core.step()
        found += step.stats.host_gap_seconds if step is not None and step.stats is not None else []
    assert found == gaps


def test_gap_counts_from_when_the_device_was_last_seen_at_work() -> None:
    """A step that was done before the host looked may have been done for long."""
    rig = Rig(depth=1)
    now = 100.0
    core = EngineCore(rig.scheduler, rig.executor, depth=1, clock=lambda: now)
    rig.send(add("r", prompt(3), max_tokens=2))
    assert core.step() is None
    rig.executor.would_be_done = lambda pending: True  # type: ignore[method-assign]
    now = 107.0
    assert core.step() is not None
    step = core.step()
    assert step is not None
    assert step.stats is not None
    assert step.stats.host_gap_seconds == [7.0]


def core_with_clock(device_seconds: float, depth: int = 1) -> tuple[Rig, EngineCore, list[float]]:
    """Return a core that knows how long steps of this device take, and its clock: a list of one."""
    rig = Rig(depth=depth, device_seconds=device_seconds)
    clock = [100.0]
    core = EngineCore(rig.scheduler, rig.executor, depth=depth, clock=lambda: clock[0])
    rig.executor.would_be_done = lambda pending: False  # type: ignore[method-assign]
    rig.send(add("old", prompt(3), max_tokens=20))
    while (
        len(rig.scheduler.running) == 0
        or rig.scheduler.running[0].num_tokens - rig.scheduler.running[0].num_prompt_tokens < 3
    ):
        core.step()
    return rig, core, clock


def test_next_step_is_not_due_before_half_of_a_long_one_is_over() -> None:
    _, core, clock = core_with_clock(0.008)
    assert core.patience_s() == pytest.approx(0.004)
    clock[0] += 0.003
    assert core.patience_s() == pytest.approx(0.001)
    clock[0] += 0.003
    assert core.patience_s() == 0.0


@pytest.mark.parametrize(("device_seconds", "depth"), [(0.001, 1), (0.008, 0)])
def test_next_step_is_due_at_once_when_steps_are_short_or_nothing_runs(device_seconds: float, depth: int) -> None:
    _, core, _ = core_with_clock(device_seconds, depth)
    assert core.patience_s() == 0.0


def test_next_step_is_due_when_the_running_one_is_over_early() -> None:
    rig, core, _ = core_with_clock(0.008)
    rig.executor.would_be_done = lambda pending: True  # type: ignore[method-assign]
    assert core.patience_s() == 0.0


def test_program_that_never_ran_is_not_waited_for() -> None:
    rig, core, _ = core_with_clock(0.008)
    assert core.handle(add("new", prompt(9, 5), max_tokens=2)) == []
    core.step()
    assert rig.scheduler.in_flight
    assert core.patience_s() == 0.0


@both_depths
def test_stop_ends_everything_that_is_left(depth: int) -> None:
    rig = Rig(max_num_seqs=1, depth=depth)
    rig.send(add("running", prompt(3)), add("waiting", prompt(3)))
    turn(rig)
    rig.collect(rig.core.stop(STOP_ERROR).outputs)
    assert {name: end.error for name, end in rig.ends.items()} == {"running": STOP_ERROR, "waiting": STOP_ERROR}
    while turn(rig):
        pass
    assert rig.kv.usage == 0.0


def test_hello_needs_no_answer() -> None:
    assert Rig().core.handle(Hello()) == []


def test_command_resets_the_prefix_cache() -> None:
    rig = Rig()
    rig.run(add("a", prompt(12)))
    assert rig.core.run_command("reset_prefix_cache") is None
    rig.run(add("b", prompt(12)))
    assert rig.ends["b"].num_cached_tokens == 0


def test_stats_cover_every_step_once() -> None:
    rig = Rig()
    rig.send(add("r", prompt(20), max_tokens=3))
    steps = [rig.core.step() for _ in range(4)]
    stats = [step.stats for step in steps if step is not None and step.stats is not None]
    assert [s.bucket_steps for s in stats] == [{"mixed/16": 1}, {"mixed/4": 1}, {"decode/1": 1}, {"decode/1": 1}]
    assert [s.iteration_tokens_total for s in stats] == [[16], [4], [1], [1]]
    assert [s.padding_tokens for s in stats] == [{"mixed": 0}, {"mixed": 0}, {"decode": 0}, {"decode": 0}]
    assert [s.num_steps for s in stats] == [1] * 4
    assert [len(s.device_step_seconds) for s in stats] == [1] * 4
    assert [len(s.host_gap_seconds) for s in stats] == [0, 1, 1, 1]  # the device did not wait before the first
    assert {s.compilations["serving"] for s in stats} == {0}
    assert sum(s.generation_tokens for s in stats) == 3
    idle = rig.core.heartbeat().stats
    assert (idle.num_steps, idle.bucket_steps, idle.num_requests_running) == (0, {}, 0)


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_exactly_once_under_random_failures(seed: int) -> None:
    """Requests good and bad, aborts of any id at any time, failing steps, a stop in the middle, overlap, multi-step decode."""
    chance = random.Random(seed)
    rig = Rig(
        num_blocks=16,
        max_num_seqs=4,
        max_queued_requests=6,
        fail_at_steps=frozenset(range(chance.randrange(1, 9), 200, chance.randrange(5, 11))),
        depth=seed // 2 % 2,
        max_decode_steps=1 + seed // 4 % 2 * 4,
        shows_tokens=seed % 3 > 0,
    )
    answers: list[RequestOutput] = []
    sent = []
    for i in range(120):
        name = f"r{i}"
        length = chance.choice([0, 1, 5, 20, 40, 200])
        message = add(name, prompt(length, i), max_tokens=chance.randrange(1, 12), priority=chance.choice([0, 0, -1]))
        sent.append(name)
        answers += rig.core.handle(message)
        answers += (
            rig.core.handle(Abort([RequestId(f"r{i + 1 - chance.randrange(7)}")])) if chance.random() < 0.3 else []
        )
        for _ in range(chance.randrange(3)):
            step = rig.core.step()
            answers += [] if step is None else step.outputs
    if seed % 2:
        answers += rig.core.stop(STOP_ERROR).outputs
    while rig.core.has_work:
        step = rig.core.step()
        answers += [] if step is None else step.outputs
    ended = [answer.request_id for answer in answers if answer.finish_reason is not None]
    assert sorted(ended) == sorted(sent)
    last_outputs = {answer.request_id: answer for answer in answers}
    assert all(answer.finish_reason is not None for answer in last_outputs.values()), "an output after the end"
    assert {answer.finish_reason for answer in answers} >= {"length", "error", "abort", None}
    assert rig.kv.usage == 0.0
