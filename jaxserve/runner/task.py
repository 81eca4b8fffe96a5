"""The differences between generation and embedding on the devices, as data: `steps.GENERATION`, `embedding.embedding_task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jaxserve.runner.inputs import Program
from jaxserve.runner.state import DeviceState, StateArrays
from jaxserve.scheduler.plan import Buckets, Plan

PlanT = TypeVar("PlanT", bound=Plan)
ResultT = TypeVar("ResultT")
Step = Callable[
    [Any, tuple[jax.Array, ...], StateArrays, jax.Array, Program], tuple[StateArrays, tuple[jax.Array, ...]]
]
"""A traced step: (skeleton, parameters, state, packed plan, program) to (state, outputs)."""


@dataclass(frozen=True, slots=True)
class StepTask(Generic[PlanT, ResultT]):
    """The functions that compute one kind of plan."""

    name: str
    """Part of the key of each program: everything that decides what `step` computes."""
    step: Step
    fields: Mapping[str, str]
    """The packed plan's layout, see `inputs.split`."""
    programs: Callable[[Buckets, int], tuple[Program, ...]]
    """From (buckets, pages of the longest request) to every program, largest first."""
    pack: Callable[[PlanT, Program], np.ndarray]
    unpack: Callable[[PlanT, Program, Sequence[np.ndarray], float], ResultT]
    """From (plan, program, outputs, device seconds)."""
    dummy_plan: Callable[[Program], PlanT]
    """A step of no request, for the first run of a program."""
    num_outputs: Callable[[PlanT], int] = lambda plan: 1
    """Outputs that the host reads, of those that a step returns."""
    update_state: Callable[[DeviceState, PlanT], None] = lambda state, plan: None
    """Called before the step is dispatched."""
