"""Calling executables: the pool passes from step to step, and a failed step does not take the next one with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native

from jaxserve.layers.cache import KVPool
from jaxserve.runner.inputs import OUTPUT_FIELDS, Program, packed_size
from jaxserve.runner.runner import PendingStep, Runner, StepLostError
from jaxserve.runner.state import DeviceState, StateArrays, StateShapes
from jaxserve.runner.steps import GENERATION
from jaxserve.runner.warmup import warm_up
from jaxserve.sampling.params import COLUMNS
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, StepPlan, StepResult
from jaxserve.types import ProgramKind, RequestId

PROGRAM = Program("decode", num_tokens=1, num_rows=1, max_pages=1, num_slots=1)
PLAN = StepPlan(
    kind="decode",
    bucket=1,
    request_ids=(RequestId("r"),),
    slots=np.array([0], np.int32),
    num_scheduled_tokens=np.array([1], np.int32),
    num_computed_tokens=np.array([0], np.int32),
    token_ids=np.array([7], np.int32),
    block_tables=np.array([[1]], np.int32),
    is_sampling=np.array([True]),
    sampling=np.zeros((1, len(COLUMNS)), np.int32),
    length_limits=np.array([9], np.int32),
    stop_token_ids=np.full((1, MAX_STOP_TOKENS), -1, np.int32),
    num_top_logprobs=0,
)


class LostResult:
    """The output of a step that failed on the device: the error comes when it is read."""

    def copy_to_host_async(self) -> None:
        pass

    def is_ready(self) -> bool:
        return True

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise RuntimeError("the device is unhappy")


class CountingStep:
    """Takes the pool's buffers away as donation does, and gives back a pool that counts the steps it has seen."""

    def __init__(self, fails_at: str, failing_step: int) -> None:
        self.fails_at, self.failing_step = fails_at, failing_step
        self.num_steps = 0

    def __call__(self, params: Any, state: StateArrays, packed: np.ndarray) -> tuple[StateArrays, tuple[Any]]:
        is_failing = self.num_steps == self.failing_step
        self.num_steps += 1
        halves = jax.tree.leaves(state.cache)
        pool = KVPool(*(half + 1 for half in halves))
        for half in halves:
            half.delete()
        if is_failing and self.fails_at == "submit":
            raise RuntimeError("the device is unhappy")
        result = jnp.full(packed_size(PROGRAM, OUTPUT_FIELDS), pool.k[0], jnp.int32)
        return StateArrays((pool,), None), (LostResult() if is_failing else result.at[0].set(1),)


class ZeroState(DeviceState):
    """A pool of one number, without programs."""

    def __init__(self, shapes: StateShapes = StateShapes(None, 0, 0)) -> None:  # noqa: B008  (immutable)
        super().__init__(shapes, {})

    def _new_arrays(self) -> StateArrays:
        return StateArrays((KVPool(jnp.zeros(1), jnp.zeros(1)),), None)  # type: ignore[arg-type, unused-ignore]

    def init_slots(self, inits: Any, masks: Any) -> None:
        pass


class CheckedProvider:
    """Stands for the thread that touches memory."""

    def __init__(self, arrays: list[jax.Array], is_busy: Callable[[], bool]) -> None:
        self.arrays, self.is_busy = arrays, is_busy
        self.num_stops = 0
        self.is_stopped_in_time = False
        """True once it was stopped while the arrays existed."""

    def stop(self) -> None:
        self.num_stops += 1
        self.is_stopped_in_time = not any(array.is_deleted() for array in self.arrays)


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> list[CheckedProvider]:
    """Return the providers that a test makes, in order."""
    made: list[CheckedProvider] = []

    def make(arrays: list[jax.Array], num_processors: int, is_busy: Callable[[], bool]) -> CheckedProvider:
        assert num_processors >= 1
        made.append(CheckedProvider(arrays, is_busy))
        return made[-1]

    monkeypatch.setattr(native, "MemoryProvider", make)
    return made


def test_memory_is_no_longer_provided_once_arrays_are_given_back(providers: list[CheckedProvider]) -> None:
    state = ZeroState(StateShapes(None, 0, 0, backend="native"))
    arrays = jax.tree.leaves(state.arrays.cache)
    state.provide_memory()
    state.release()
    state.release()
    assert [(provider.num_stops, provider.is_stopped_in_time) for provider in providers] == [(1, True)]
    assert providers[0].arrays == arrays and all(array.is_deleted() for array in arrays)


def test_memory_is_provided_while_no_steps_are_dispatched(providers: list[CheckedProvider]) -> None:
    state = ZeroState(StateShapes(None, 0, 0, backend="native"))
    state.provide_memory()
    assert not providers[0].is_busy()
    before = time.monotonic()
    Runner(GENERATION, (), state, {PROGRAM: CountingStep("never", -1)}).submit(PLAN).result()
    assert before <= state.last_step_s <= time.monotonic()
    state.last_step_s = time.monotonic()
    assert providers[0].is_busy()
    state.last_step_s -= 60
    assert not providers[0].is_busy()


@pytest.mark.parametrize("looks", [{"return_value": False}, {"side_effect": RuntimeError("deleted")}])
def test_memory_is_not_provided_while_a_long_step_is_computed(
    providers: list[CheckedProvider], looks: dict[str, Any]
) -> None:
    """The next step may take the arrays while the thread looks at them."""
    state = ZeroState(StateShapes(None, 0, 0, backend="native"))
    state.provide_memory()
    array = mock.create_autospec(type(jnp.zeros(1)), instance=True)
    array.is_ready.configure_mock(**looks)
    state.arrays = state.arrays._replace(cache=(KVPool(array, array),))
    state.last_step_s = time.monotonic() - 60
    assert providers[0].is_busy()


def test_memory_of_renewed_arrays_is_provided_if_that_of_the_first_was(providers: list[CheckedProvider]) -> None:
    state = ZeroState(StateShapes(None, 0, 0, backend="native"))
    state.renew()
    assert not providers, "no engine is ready yet"
    state.provide_memory()
    first = jax.tree.leaves(state.arrays.cache)
    state.renew()
    assert [provider.num_stops for provider in providers] == [1, 0] and providers[0].is_stopped_in_time
    assert [provider.arrays for provider in providers] == [first, jax.tree.leaves(state.arrays.cache)]
    state.release()  # sleep
    assert [provider.num_stops for provider in providers] == [1, 1]
    state.renew()
    assert [provider.num_stops for provider in providers] == [1, 1, 0]


@pytest.mark.parametrize("fails_at", ["submit", "result"])
def test_memory_of_the_pool_after_a_failed_step_is_provided(providers: list[CheckedProvider], fails_at: str) -> None:
    state = ZeroState(StateShapes(None, 0, 0, backend="native"))
    runner = Runner(GENERATION, (), state, {PROGRAM: CountingStep(fails_at, failing_step=0)})
    state.provide_memory()
    with pytest.raises(RuntimeError, match="unhappy"):
        tokens(runner)
    assert [provider.arrays for provider in providers[1:]] == [jax.tree.leaves(state.arrays.cache)]


@pytest.mark.parametrize("fails_at", ["submit", "result"])
def test_after_a_failed_step_tokens_come_with_results(fails_at: str) -> None:
    """A step that was lost may report when the next one is read."""
    runner, reports = new_runner(CountingStep(fails_at, failing_step=0)), mock.create_autospec(native.Reports)
    runner.reports = reports
    with pytest.raises(RuntimeError, match="unhappy"):
        tokens(runner)
    reports.close.assert_called_once_with()
    assert runner.reports is None
    assert tokens(runner) == [1]


@pytest.mark.parametrize(("kind", "num_calls"), [("decode", 1), ("speculate", 0)])
def test_only_loops_over_decode_steps_are_asked_for_tokens_before_their_end(kind: ProgramKind, num_calls: int) -> None:
    """A speculative step reports none, and the wait for a report would count as its time."""
    runner, reports = new_runner(CountingStep("never", -1)), mock.create_autospec(native.Reports)
    runner.reports = reports
    program = replace(PROGRAM, kind=kind, max_steps=4)
    outputs = [jnp.zeros(packed_size(program, OUTPUT_FIELDS), jnp.int32)]
    step = PendingStep(runner, PLAN, program, outputs, index=0, started=0.0)
    step.next_tokens()
    step.result()
    assert reports.next.call_count == reports.end.call_count == num_calls


def new_runner(step: CountingStep) -> Runner[StepPlan, StepResult]:
    return Runner(GENERATION, (), ZeroState(), {PROGRAM: step})


def tokens(runner: Runner[StepPlan, StepResult]) -> list[int]:
    return runner.submit(PLAN).result().token_ids[0].tolist()


@pytest.mark.parametrize(("platform", "num_runs"), [("cpu", 1), ("tpu", 1), ("gpu", 2)])
def test_programs_run_before_the_first_request_twice_where_the_second_run_makes_a_graph(
    platform: str, num_runs: int
) -> None:
    step, done = CountingStep("never", -1), list[tuple[int, int, str]]()
    warm_up(new_runner(step), GENERATION, [PROGRAM], platform, lambda *each: done.append(each))
    assert step.num_steps == num_runs
    assert done == [(0, 1, ""), (1, 1, PROGRAM.name)]


def test_pool_passes_from_step_to_step() -> None:
    runner = new_runner(CountingStep("never", -1))
    assert [tokens(runner) for _ in range(3)] == [[1], [2], [3]]


@pytest.mark.parametrize("fails_at", ["submit", "result"])
def test_step_after_a_failed_one_starts_from_an_empty_pool(fails_at: str) -> None:
    runner = new_runner(CountingStep(fails_at, failing_step=2))
    assert [tokens(runner) for _ in range(2)] == [[1], [2]]
    with pytest.raises(RuntimeError, match="unhappy"):
        tokens(runner)
    assert [tokens(runner) for _ in range(2)] == [[1], [2]]


def test_step_dispatched_after_a_failed_one_is_lost_with_it() -> None:
    runner = new_runner(CountingStep("result", failing_step=1))
    pending = [runner.submit(PLAN) for _ in range(3)]
    assert pending[0].result().token_ids.tolist() == [[1]]
    with pytest.raises(RuntimeError, match="unhappy"):
        pending[1].result()
    with pytest.raises(StepLostError):
        pending[2].result()
    assert [tokens(runner) for _ in range(2)] == [[1], [2]]


def test_step_that_cannot_be_dispatched_spares_the_one_before_it() -> None:
    runner = new_runner(CountingStep("submit", failing_step=1))
    pending = runner.submit(PLAN)
    with pytest.raises(RuntimeError, match="unhappy"):
        runner.submit(PLAN)
    assert pending.result().token_ids.tolist() == [[1]]
    assert [tokens(runner) for _ in range(2)] == [[1], [2]]
