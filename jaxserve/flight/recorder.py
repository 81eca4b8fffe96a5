"""Keeps the last decisions of a scheduler in memory: what it was given, and the plans that it made.

Two segments follow each other. Each begins with a capture of the scheduler's state and takes `num_steps` plans. So from the
second segment on, there are at least `num_steps` plans at any time, and the state before the first of them. The arrays of
plans are kept as they are, not copied, and written as plain data only when a file is. Their bytes are counted: a
segment that grows too large ends early, and then there are fewer plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np

from jaxserve.flight.capture import Capture, capture, recorded_sampling
from jaxserve.ipc.messages import AddRequest
from jaxserve.kv.block_table import HashChain
from jaxserve.sampling.params import needs_state
from jaxserve.scheduler.constrained import GrammarEvents
from jaxserve.scheduler.plan import NO_SLOT, StepPlan, StepResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import NULL_BLOCK, RequestId

T = TypeVar("T")

MAX_SEGMENT_BYTES: Final = 16 << 20
MAX_OVERRUN: Final = 4
"""A segment that cannot end, as steps with drafts are always in flight, keeps no more events beyond so many times its limits."""
_EVENT_BYTES: Final = 1000
HASH_BYTES: Final = 80
"""Bytes of an event without its arrays, as tests/unit/flight/test_recorder_memory.py measures them, and of the hash of one page."""


@dataclass(slots=True)
class Arrival:
    """The part of a request that the scheduler reads, without tokens."""

    request_id: RequestId
    num_prompt_tokens: int
    sampling: dict[str, Any]
    needs_state: bool
    has_grammar: bool
    priority: int
    key_name: str
    adapter: int
    chain: HashChain | None = None
    """Its page hashes; they grow."""

    @classmethod
    def of(cls, message: AddRequest) -> Arrival:
        return cls(
            message.request_id,
            len(message.prompt_token_ids),
            recorded_sampling(message.sampling),
            needs_state(message.sampling),
            message.grammar is not None,
            message.priority,
            message.key_name,
            message.adapter,
        )


@dataclass(frozen=True, slots=True)
class KeptEvents:
    """Changes of grammars, by request."""

    ready: list[RequestId]
    jumped: list[tuple[RequestId, list[int]]]
    terminated: list[RequestId]
    failed: list[RequestId]

    @classmethod
    def of(cls, events: GrammarEvents) -> KeptEvents:
        return cls(
            events.ready,
            [(request.request_id, tokens) for request, tokens in events.jumped],
            [request.request_id for request in events.terminated],
            [request.request_id for request, _ in events.failed],
        )


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan without what a comparison does not need; arrays as in the plan."""

    fields: dict[str, Any]
    wholes: np.ndarray  # bool [B]
    """Rows of which `pages` has all pages."""
    pages: np.ndarray  # int32
    token_ids: np.ndarray | None
    """Only of plans with drafts."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays, and of the ids."""
        parts = (*self.fields.values(), self.wholes, self.pages, self.token_ids)
        return sum(part.nbytes for part in parts if isinstance(part, np.ndarray)) + 8 * len(self.fields["request_ids"])


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A call of `schedule`."""

    starts_requests: bool
    plan: KeptPlan | None = None


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The part of a result that the scheduler reads."""

    token_ids: np.ndarray  # int32 [K, B]
    device_seconds: float
    has_scores: bool

    @classmethod
    def of(cls, result: StepResult) -> KeptResult:
        # A copy: the array is a view of all that the program returned, log-probabilities of every row among it.
        return cls(result.token_ids.copy(), result.device_seconds, result.prompt_scores is not None)


@dataclass(slots=True)
class Event:
    """One call of the scheduler."""

    kind: str
    value: Any
    """Its arguments; for `schedule`, what it returned as well."""
    times: list[float]
    """Readings of the scheduler's clock during the call."""
    error: str | None = None
    """The exception that it raised."""


@dataclass(slots=True)
class Segment:
    """The calls after a captured state."""

    start: Capture
    first_step: int
    """Number of the first plan, counted from 1 at the engine's start."""
    events: list[Event] = field(default_factory=list)
    num_steps: int = 0
    num_bytes: int = 0
    num_kept: int | None = None
    """Events to replay, if later ones were not kept; None: all."""


class Recorder:
    """The calls of one scheduler. They belong to the engine's thread; any thread may ask for `segments`."""

    def __init__(self, num_steps: int, block_size: int, num_tables: int = 1) -> None:
        """num_steps: plans of a segment. num_tables: page tables of a request."""
        self._num_steps = num_steps
        self._block_size = block_size
        self._num_tables = num_tables
        self._max_bytes = MAX_SEGMENT_BYTES
        self.segments: tuple[Segment, ...] = ()
        """Oldest first: at most two."""
        self._times: list[float] = []
        self._last_ids: tuple[RequestId, ...] = ()
        """Requests of the last plan."""

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """Return `clock` for the scheduler: its readings are recorded."""

        def read() -> float:
            now_s = clock()
            self._times.append(now_s)
            return now_s

        return read

    def begin_step(self, scheduler: Scheduler) -> None:
        """Begin a new segment if it is time, and no step with drafts is in flight. Call it between two calls of the
        scheduler."""
        last = self.segments[-1] if self.segments else None
        is_due = last is None or last.num_steps >= self._num_steps or last.num_bytes >= self._max_bytes
        if is_due and not any((plan.slots == NO_SLOT).any() for plan, _ in scheduler.in_flight):
            first_step = 1 if last is None else last.first_step + last.num_steps
            whole = [segment for segment in self.segments[-1:] if segment.num_kept is None]
            self.segments = (*whole, Segment(capture(scheduler), first_step))
            self._last_ids = ()
        elif last is not None and (
            last.num_steps >= MAX_OVERRUN * self._num_steps or last.num_bytes >= MAX_OVERRUN * self._max_bytes
        ):
            last.num_kept = last.num_kept or len(last.events)
            del last.events[last.num_kept :]

    def call(
        self,
        kind: str,
        value: object,
        function: Callable[[], T],
        complete: Callable[[Event, T], int | None] = lambda event, returned: 0,
    ) -> T:
        """Call a method of the scheduler and record the call.

        `complete` adds to the event what came of the call. It returns the bytes that the event holds beyond its own; None
        if the call has changed nothing, and is not kept. Other threads see an event only when it is complete.
        """
        event = Event(kind, value, [])
        self._times = event.times
        try:
            returned = function()
        except Exception as error:
            event.error = f"{type(error).__name__}: {error}"
            self._keep(event, 0)
            raise
        self._keep(event, complete(event, returned))
        return returned

    def complete_plan(self, event: Event, plan: StepPlan) -> int:
        """Add the plan that a call of `schedule` has returned."""
        kept = self._kept(plan)
        event.value = Scheduled(event.value.starts_requests, kept)
        return kept.num_bytes

    def _keep(self, event: Event, num_bytes: int | None) -> None:
        if num_bytes is None:
            return
        segment = self.segments[-1]
        segment.num_steps += isinstance(event.value, Scheduled) and event.value.plan is not None
        segment.num_bytes += _EVENT_BYTES + num_bytes
        segment.events.append(event)

    def _kept(self, plan: StepPlan) -> KeptPlan:
        known, self._last_ids = set(self._last_ids), plan.request_ids
        wholes = plan.num_scheduled_tokens > 1
        if not known.issuperset(plan.request_ids):
            wholes = wholes | np.array([each not in known for each in plan.request_ids])
        has_drafts = plan.kind == "decode" and bool((plan.slots == NO_SLOT).any())
        pages = pages_of(plan, self._block_size, self._num_tables, wholes)
        return KeptPlan(plan_fields(plan), wholes, pages, plan.token_ids if has_drafts else None)


def plan_fields(plan: StepPlan) -> dict[str, Any]:
    """Return the fields of a plan that decide what is computed, tokens and pages apart."""
    return {
        "kind": plan.kind,
        "bucket": plan.bucket,
        "num_steps": plan.num_steps,
        "request_ids": plan.request_ids,
        "slots": plan.slots,
        "num_scheduled_tokens": plan.num_scheduled_tokens,
        "num_computed_tokens": plan.num_computed_tokens,
        "is_sampling": plan.is_sampling,
        "length_limits": plan.length_limits,
        "num_top_logprobs": plan.num_top_logprobs,
        "num_prompt_logprobs": plan.num_prompt_logprobs,
        "adapters": plan.adapters,
        "state_slots": plan.state_slots,
        "draft_lengths": plan.draft_lengths,
        "is_position_unread": plan.is_position_unread,
        "slot_inits": tuple([each.slot for each in plan.slot_inits]),
        "masks": tuple([mask.slot for mask in plan.masks]),
    }


def pages_of(plan: StepPlan, block_size: int, num_tables: int, wholes: np.ndarray) -> np.ndarray:
    """Return the last page that each row writes in each table, then all pages of the rows of `wholes`.

    A request's pages only grow: all pages at its first row and the last ones of the others tell the table.
    """
    num_rows, width = plan.block_tables.shape
    ends = plan.num_computed_tokens + plan.num_scheduled_tokens + (plan.num_steps - 1)
    last = np.minimum((ends - 1) // block_size, width // num_tables - 1)
    tails = plan.block_tables.reshape(num_rows, num_tables, -1)[np.arange(num_rows), :, last].ravel()
    if not wholes.any():
        return tails
    tables = plan.block_tables[wholes]
    return np.concatenate([tails, tables[tables != NULL_BLOCK]])
