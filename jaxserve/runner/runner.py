"""Runs step plans on the devices: owns parameters, KV pool, slots and executables.

A step that fails takes pool and slots with it: their buffers were donated, and what came back holds an
error. So do the steps that were dispatched behind it. The next step starts from zeroed ones. That loses
nothing the scheduler still counts on: every running request has a row in some step in flight, so it failed
with it, and cached pages are forgotten after a failure.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxserve.layers.attention import KVPool
from jaxserve.runner.inputs import Program, pack, unpack_result, unpack_scores
from jaxserve.runner.upkeep import Keeper
from jaxserve.scheduler.plan import StepPlan, StepResult


class StepLostError(Exception):
    """A step that was dispatched before this one failed."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A dispatched step whose result is on its way to the host."""

    runner: Runner
    packed: jax.Array
    scores: jax.Array | None
    """Where somebody asks for them."""
    program: Program
    num_rows: int
    num_tokens: int
    index: int
    started: float

    def is_done(self) -> bool:
        return bool(self.packed.is_ready())  # type: ignore[attr-defined]

    def result(self) -> StepResult:
        """Wait for the device and unpack."""
        if self.index in self.runner.lost:
            raise StepLostError("a step that was dispatched before this one failed")
        try:
            packed = np.asarray(self.packed)
            scores = None if self.scores is None else np.asarray(self.scores)
        except Exception:
            self.runner.renew(self.index)
            raise
        result = unpack_result(packed, self.program, self.num_rows, self.runner.seconds_since(self.started))
        if scores is None:
            return result
        return replace(result, prompt_scores=unpack_scores(scores, self.program, self.num_tokens))


Executable = Callable[
    [tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array, np.ndarray],
    tuple[jax.Array, ...],
]
"""Parameters, the two halves of the pool and the slots (all three DONATED) and the packed plan; gives back pool and
slots, the packed result, and if it is mixed the packed scores of prompt tokens."""


class Runner:
    """Calls executables directly, so that a shape nobody compiled is an error and never a compilation."""

    def __init__(
        self,
        params: tuple[jax.Array, ...],
        pool: KVPool,
        keeper: Keeper,
        executables: Mapping[Program, Executable],
    ) -> None:
        self._params = params
        self._pool = pool
        self._executables = {
            (program.kind, program.num_tokens): (program, compiled) for program, compiled in executables.items()
        }
        self._keeper = keeper
        self._slots = keeper.new_slots()
        self._last_read = 0.0
        self._num_submitted = 0
        self.lost = range(0)
        """Steps that were dispatched behind the one that failed last, before its failure showed."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Dispatch one step, after the slots of `plan.slot_inits` are initialised; the buffers of pool and slots pass from this step to the next."""
        program, executable = self._executables[plan.kind, plan.bucket]
        packed = pack(plan, program)
        started = time.monotonic()
        index, self._num_submitted = self._num_submitted, self._num_submitted + 1
        try:
            for init in plan.slot_inits:
                self._slots = self._keeper.init_slot(self._slots, init)
            if plan.masks:
                self._slots = self._keeper.mask(self._slots, plan.masks)
            k, v, self._slots, result, *scores = executable(
                self._params, self._pool.k, self._pool.v, self._slots, packed
            )
        except Exception:
            self.renew(index)
            raise
        self._pool = KVPool(k, v)
        wanted = scores[0] if plan.targets is not None else None
        for array in (result, wanted):
            if array is not None:
                array.copy_to_host_async()
        return PendingStep(self, result, wanted, program, len(plan.request_ids), plan.num_tokens, index, started)

    def provide_memory(self) -> None:
        """Have all memory of the pool provided before somebody waits for it; returns at once."""
        self._keeper.provide(self._pool)

    def seconds_since(self, started: float) -> float:
        """How long a step that is over took: from its dispatch, or from the end of the one before it."""
        now = time.monotonic()
        seconds = now - max(started, self._last_read)
        self._last_read = now
        return seconds

    def renew(self, failed: int) -> None:
        """Zeroed pool and slots in place of those that step number `failed` has left.

        The old pool goes first: there is no room for two.
        """
        self.lost = range(failed + 1, self._num_submitted)
        with contextlib.suppress(Exception):  # steps that were dispatched behind the failed one are over then
            jax.block_until_ready(self._pool)
        for array in self._pool:
            array.delete()
        self._pool = self._keeper.new_pool()
        self._slots.delete()
        self._slots = self._keeper.new_slots()
