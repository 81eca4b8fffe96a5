"""The engine without its surroundings: messages in, steps done, news out. No sockets, no signals.

Promises: every AddRequest given to `handle` ends in exactly one terminal RequestOutput; no message and
no failing step raises here. A failed step ends its own requests and the engine goes on; when the next
step fails as well, the device is taken for broken and `is_broken` tells the loop to give up.

Steps overlap by `depth`: with 1 a step is dispatched before the result of the one before it is read, so
that the device goes on while the host deals with tokens. With 0 it is the same code, and nothing overlaps.

A step that is dispatched early keeps out whoever comes after it. So when the running step is a long one,
`patience_s` says how long the caller may go on listening before the next step is due.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from jaxserve.engine.meter import count_call
from jaxserve.engine.protocol import Plan, Result, StepScheduler
from jaxserve.errors import InternalError, RequestError, UnavailableError
from jaxserve.executor.profiler import Profiler
from jaxserve.executor.protocol import Executor, Pending
from jaxserve.ipc.messages import (
    Abort,
    AddRequest,
    Command,
    CommandName,
    ErrorInfo,
    Heartbeat,
    Hello,
    RequestOutput,
    StepOutputs,
    ToEngine,
)
from jaxserve.ipc.stats import EngineStats
from jaxserve.scheduler.admission import error_info
from jaxserve.types import ProgramKind, RequestId

_log = logging.getLogger(__name__)

STEP_ERROR: Final = error_info(InternalError("The server had an internal error while processing this request."))
MEMORY_ERROR: Final = error_info(UnavailableError("The device ran out of memory. Please retry later."))
STOP_ERROR: Final = error_info(UnavailableError("The engine is stopping. Please retry later."))

_LONG_STEP_S: Final = 0.005
"""Steps shorter than this are not worth waiting for anybody."""
_LISTENING_SHARE: Final = 0.5
"""Of a step's expected time. The other half is for steps that end early, and for a host that is late."""
_MAX_FAILURES: Final = 2
"""Failed steps in a row after which the engine gives up."""


@dataclass(slots=True)
class _Dispatched:
    """A step that the device has."""

    plan: Plan
    pending: Pending[Result]
    gap_s: float | None
    """How long the device was idle before it, at most; None when it had nothing to do."""
    dispatched_s: float

    @property
    def program(self) -> tuple[ProgramKind, int]:
        return self.plan.kind, self.plan.bucket


@dataclass(frozen=True, slots=True)
class _NeverStarted:
    """A step that could not be handed to the device."""

    error: Exception

    def is_done(self) -> bool:
        return True

    def result(self) -> Result:
        raise self.error


class EngineCore:
    """One scheduler, one executor, and up to `depth` steps on the device that nobody waits for yet."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor[Any, Result],
        *,
        depth: int = 1,
        profiler: Profiler | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._profiler = profiler or Profiler(None)
        self._clock = clock
        self._num_failures = 0
        self._in_flight: deque[_Dispatched] = deque()
        self._last_busy: float | None = None
        """When the device was last known to work or to have just finished, while requests were left."""
        self._last_read_s = 0.0
        self._recent_seconds: dict[tuple[ProgramKind, int], tuple[float, float]] = {}
        """What the last two calls of each program took."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def is_broken(self) -> bool:
        """Steps fail one after the other: stop, and let somebody start a new engine."""
        return self._num_failures >= _MAX_FAILURES

    def handle(self, message: ToEngine) -> list[RequestOutput]:
        """Take in one message; returns what it has to be answered at once (refusals, ends of aborted requests)."""
        match message:
            case AddRequest():
                return self._add(message)
            case Abort():
                return self._scheduler.abort(message.request_ids)
            case Hello() | Command():
                pass  # the loop introduces us, and tells what came of `run_command`
        return []

    def run_command(self, name: CommandName) -> ErrorInfo | None:
        """Do what whoever runs the server asks; returns why it was not done."""
        try:
            match name:
                case "reset_prefix_cache":
                    self._scheduler.reset_prefix_cache()
                case "start_profile":
                    self._profiler.start()
                case "stop_profile":
                    self._profiler.stop()
        except RequestError as error:
            return error_info(error)
        except Exception:
            _log.exception("%s failed", name)
            return STEP_ERROR
        return None

    def patience_s(self) -> float:
        """How long to listen for messages before `step` is due: its plan may still take in who comes until then."""
        if not self._in_flight or self._in_flight[-1].plan.num_steps > 1:
            return 0.0
        running = self._in_flight[-1]
        expected_s = min(self._recent_seconds.get(running.program, (0.0,)))
        if expected_s < _LONG_STEP_S or running.pending.is_done():
            return 0.0
        started_s = max(running.dispatched_s, self._last_read_s)
        return max(0.0, started_s + _LISTENING_SHARE * expected_s - self._clock())

    def step(self) -> StepOutputs | None:
        """Dispatch the next step, and take in what is due; its news, or None when nothing was due."""
        self._look_at_device()
        outputs = self._scheduler.poll_grammars()
        plan = self._scheduler.schedule()
        num_kept = 0
        if plan is None:  # nothing to do, or nothing before the oldest step is over
            num_kept = max(0, len(self._in_flight) - 1)
        elif self._submit(plan):
            num_kept = self._depth
        if len(self._in_flight) <= num_kept and not outputs:
            return None
        while len(self._in_flight) > num_kept:
            outputs += self._take_in()
        return StepOutputs(outputs, self._stats())

    def heartbeat(self) -> Heartbeat:
        """A sign of life with the numbers since the last one."""
        return Heartbeat(self._stats())

    def stop(self, error: ErrorInfo) -> StepOutputs:
        """End every request that is left with `error`."""
        return StepOutputs(self._scheduler.abort_all(error), self._stats())

    def _add(self, message: AddRequest) -> list[RequestOutput]:
        try:
            error = self._scheduler.add(message)
        except (
            Exception
        ):  # a request that passed every check and still breaks us is a bug of ours, and must not end the engine
            _log.exception("request %s could not be added", message.request_id)
            error = STEP_ERROR
        return [] if error is None else [rejected(message.request_id, error)]

    def _look_at_device(self) -> float:
        """Now. When the device still works, it is noted: whenever it stops, it was not before now."""
        now = self._clock()
        if self._in_flight and not self._in_flight[-1].pending.is_done():
            self._last_busy = now
        return now

    def _submit(self, plan: Plan) -> bool:
        """Hand a step to the device. False when it did not take it: that shows when the step's turn comes."""
        now = self._look_at_device()
        gap_s = None if self._last_busy is None else now - self._last_busy
        pending: Pending[Result]
        try:
            pending = self._executor.submit(plan)
        except Exception as error:
            pending = _NeverStarted(error)
        else:
            self._last_busy = self._clock()
        self._in_flight.append(_Dispatched(plan, pending, gap_s, now))
        return not isinstance(pending, _NeverStarted)

    def _take_in(self) -> list[RequestOutput]:
        """Wait for the oldest step; what came of it."""
        step = self._in_flight.popleft()
        was_done = step.pending.is_done()
        try:
            result = step.pending.result()
        except Exception as error:  # whatever a device raises: the requests of the step pay, nobody else
            for later in self._in_flight:  # they ran on what the failed one left
                with contextlib.suppress(Exception):
                    later.pending.result()
            self._in_flight.clear()
            self._last_busy = None
            return self._failed(step.plan, error)
        self._last_read_s = self._clock()
        if not was_done:
            self._last_busy = self._last_read_s
        seconds = result.device_seconds / result.num_steps
        self._recent_seconds[step.program] = self._recent_seconds.get(step.program, (seconds, seconds))[1], seconds
        self._num_failures = 0
        count_call(self._scheduler.stats, step.plan, result, step.gap_s)
        outputs = self._scheduler.update(step.plan, result)
        if not self._scheduler.has_work:
            self._last_busy = None
        return outputs

    def _failed(self, plan: Plan, error: Exception) -> list[RequestOutput]:
        self._num_failures += 1
        _log.error(
            "step %s/%d failed (%d in a row), its requests end: %s",
            plan.kind,
            plan.bucket,
            self._num_failures,
            ", ".join(plan.request_ids),
            exc_info=error,
        )
        is_out_of_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        return self._scheduler.fail(plan, MEMORY_ERROR if is_out_of_memory else STEP_ERROR)

    def _stats(self) -> EngineStats:
        stats = self._scheduler.take_stats()
        stats.compilations = self._executor.compilations()
        return stats


def rejected(request_id: RequestId, error: ErrorInfo) -> RequestOutput:
    """The terminal message of a request that never ran."""
    return RequestOutput(request_id, [], finish_reason="error", error=error)
