"""Calling executables: the pool passes from step to step, and a failed step does not take the next one with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.attention import KVPool
from jaxserve.runner.inputs import OUTPUT_FIELDS, Program, packed_size
from jaxserve.runner.runner import Runner, StepLostError
from jaxserve.sampling.params import COLUMNS
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, SlotInit, StepPlan
from jaxserve.types import RequestId

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
    """What a step that failed on the device gives back: the error comes when it is read."""

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

    def __call__(
        self, params: Any, k: jax.Array, v: jax.Array, slots: Any, packed: np.ndarray
    ) -> tuple[Any, Any, Any, Any]:
        is_failing = self.num_steps == self.failing_step
        self.num_steps += 1
        pool = (k + 1, v + 1)
        k.delete()
        v.delete()
        if is_failing and self.fails_at == "submit":
            raise RuntimeError("the device is unhappy")
        result = jnp.full(packed_size(PROGRAM, OUTPUT_FIELDS), pool[0][0], jnp.int32)
        return *pool, slots + 1, LostResult() if is_failing else result.at[0].set(1)


class CountingKeeper:
    """Slots whose words all say how many requests were given a slot since they were made."""

    def new_pool(self) -> KVPool:
        return KVPool(jnp.zeros(1), jnp.zeros(1))  # type: ignore[arg-type, unused-ignore]

    def new_slots(self) -> jax.Array:
        return jnp.zeros(1)

    def init_slot(self, slots: jax.Array, init: SlotInit) -> jax.Array:
        return slots + 1


def new_runner(step: CountingStep) -> Runner:
    keeper = CountingKeeper()
    return Runner((), keeper.new_pool(), keeper, {PROGRAM: step})  # type: ignore[arg-type, unused-ignore]


def tokens(runner: Runner) -> list[int]:
    return runner.submit(PLAN).result().token_ids[0].tolist()


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


def test_step_dispatched_behind_a_failed_one_is_lost_with_it() -> None:
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
