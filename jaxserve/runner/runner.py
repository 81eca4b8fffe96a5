"""Runs plans on the devices: owns parameters, state and executables.

A failed step leaves no usable state: its buffers were donated, and the returned ones hold an error. Steps that were
dispatched after it are lost as well. The next step starts from zeroed state. The scheduler does not rely on what is
lost: every running request has a row in some step in flight, so it failed with it, and cached pages are forgotten
after a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import jax
import numpy as np
from jaxserve_kernels.native import Reports

from jaxserve.runner.images.parts import SharedParams
from jaxserve.runner.images.programs import ROW_KINDS, RowItem, row_calls
from jaxserve.runner.inputs import PlanT, Program, ResultT, StepTask
from jaxserve.runner.state import DeviceState, StateArrays

Executable = Callable[[tuple[jax.Array, ...], StateArrays, np.ndarray], tuple[StateArrays, Sequence[jax.Array]]]
"""A compiled step: (parameters, state (DONATED), packed plan) to (state, outputs)."""


class StepLostError(Exception):
    """A step that was dispatched before this one failed."""


@dataclass(frozen=True, slots=True)
class PendingStep(Generic[PlanT, ResultT]):
    """A dispatched step whose outputs are on their way to the host."""

    runner: Runner[PlanT, ResultT]
    plan: PlanT
    program: Program
    outputs: Sequence[jax.Array]
    index: int
    started: float

    def is_done(self) -> bool:
        return bool(self.outputs[0].is_ready())  # type: ignore[attr-defined]

    def result(self) -> ResultT:
        return self.runner.read(self)

    def next_tokens(self) -> np.ndarray | None:
        return self.runner.next_tokens(self)

    def wait(self) -> None:
        """Block until the step is done, and read nothing. Raises the error of the step."""
        jax.block_until_ready(self.outputs)


class Runner(Generic[PlanT, ResultT]):
    """Calls executables directly, so that a shape that was not compiled is an error and never a compilation."""

    def __init__(
        self,
        task: StepTask[PlanT, ResultT],
        params: tuple[jax.Array, ...],
        state: DeviceState,
        executables: Mapping[Program, Executable],
        shared: SharedParams | None = None,
    ) -> None:
        """shared: parameters of programs that modules share; None: there are no such programs."""
        self._task = task
        self._shared = shared
        self.reports: Reports | None = None
        """Tokens of loops over decode steps, while they go on; None: they are known at the end."""
        self.params = params
        """The parameters of the steps to come; all steps in flight must be done before others take their place."""
        self._executables = {
            (program.kind, program.num_tokens): (program, compiled) for program, compiled in executables.items()
        }
        self._row_programs = [program for program in executables if program.kind in ROW_KINDS]
        self._state = state
        self._last_read = 0.0
        self._num_submitted = 0
        self._lost = range(0)
        """Steps that were dispatched after the one that failed last, before its failure showed."""

    def submit(self, plan: PlanT) -> PendingStep[PlanT, ResultT]:
        """Update the state for `plan` and dispatch its step; its outputs begin their way to the host."""
        step = self.dispatch(plan)
        for array in step.outputs:
            array.copy_to_host_async()
        return step

    def dispatch(self, plan: PlanT) -> PendingStep[PlanT, ResultT]:
        """Update the state for `plan` and dispatch its step."""
        program, executable = self._program(plan)
        packed = self._task.pack(plan, program)
        started = time.monotonic()
        index, self._num_submitted = self._num_submitted, self._num_submitted + 1
        try:
            self._fill_rows(self._task.row_items(plan))
            self._task.update_state(self._state, plan, program, packed)
            self._state.last_step_s = started
            self._state.arrays, outputs = executable(self.params, self._state.arrays, packed)
        except Exception:
            self._renew(index)
            raise
        return PendingStep(self, plan, program, outputs[: self._task.num_outputs(plan)], index, started)

    def add(self, program: Program, executable: Executable) -> None:
        """Let steps to come use another program. Any thread may call this."""
        self._executables = self._executables | {(program.kind, program.num_tokens): (program, executable)}

    def _program(self, plan: PlanT) -> tuple[Program, Executable]:
        """Return the program of a plan: the smallest there is of its kind that holds its bucket."""
        found = self._executables.get((plan.kind, plan.bucket))
        if found is None:
            sizes = [size for kind, size in self._executables if kind == plan.kind and size > plan.bucket]
            found = self._executables[plan.kind, min(sizes, default=plan.bucket)]
        return found

    def _fill_rows(self, items: Sequence[RowItem]) -> None:
        """Dispatch the calls that fill rows of embeddings, which the next step may read."""
        if not items:
            return
        for call in row_calls(items, self._row_programs):
            program, executable = self._executables[call.program.kind, call.program.num_tokens]
            params = self.params if self._shared is None else self._shared.of(self.params, program.kind, call.index)
            self._state.arrays, _ = executable(params, self._state.arrays, call.packed)

    def next_tokens(self, step: PendingStep[PlanT, ResultT]) -> np.ndarray | None:
        """Return what `Pending.next_tokens` does, for the oldest step whose result was not read."""
        if self.reports is None or not _may_report(step.program) or step.index in self._lost:
            return None
        return self.reports.next(step.program.num_rows, step.is_done)

    def read(self, step: PendingStep[PlanT, ResultT]) -> ResultT:
        """Return the result of `step`, which took from its dispatch, or from the end of the step before it, until now."""
        if step.index in self._lost:
            raise StepLostError("a step that was dispatched before this one failed")
        try:
            outputs = [np.asarray(array) for array in step.outputs]
        except Exception:
            self._renew(step.index)
            raise
        finally:
            if self.reports is not None and _may_report(step.program):
                self.reports.end(step.program.num_rows)
        now = time.monotonic()
        seconds, self._last_read = now - max(step.started, self._last_read), now
        return self._task.unpack(step.plan, step.program, outputs, seconds)

    def _renew(self, failed: int) -> None:
        if self.reports is not None:  # steps that were lost may report later
            self.reports.close()
            self.reports = None
        self._lost = range(failed + 1, self._num_submitted)
        self._state.renew()


def _may_report(program: Program) -> bool:
    """Return True if a program may report tokens before it is done: a loop over decode steps. A speculative step is no loop."""
    return program.kind == "decode" and program.max_steps > 1
