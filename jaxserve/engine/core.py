"""The engine without sockets and signals: takes messages, runs steps, returns outputs.

Every AddRequest given to `handle` ends in exactly one terminal RequestOutput; no message and no failing step raises.
After a failed step its requests are computed again, one half at a time, until the one that fails is found and ends
(`scheduler/isolation.py`); after an out-of-memory error, in smaller steps. If two requests are found without a step
between them that succeeds, the device counts as broken (`is_broken`), and the loop ends.

Steps overlap by `depth`: with 1 a step is dispatched before the result of the previous one is read, so that the device
works while the host handles tokens. With 0 the same code runs without overlap.

Requests that arrive after a step is dispatched cannot join it. So while a long step runs, `patience_s` returns how long
the caller may listen for messages before the next step is due.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from jaxserve.engine.adapters import AdapterPlaces
from jaxserve.engine.control import EngineControl
from jaxserve.errors import InternalError, RequestError, UnavailableError, is_out_of_memory
from jaxserve.executor.measured import Measured, resident_bytes
from jaxserve.executor.profiler import Profiler
from jaxserve.executor.protocol import BrokenExecutorError, Executor, Pending
from jaxserve.flight.flight_recorder import FlightRecorder
from jaxserve.ipc.messages import (
    ENGINE_STOPPED,
    STOPPED,
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
from jaxserve.kv.page_changes import PageChanges
from jaxserve.kv.tiers.tiers import KVTiers
from jaxserve.scheduler.admission import error_info
from jaxserve.scheduler.base import BaseScheduler
from jaxserve.scheduler.plan import Plan, Result, StepTokens
from jaxserve.types import ProgramKind, RequestId

_log = logging.getLogger(__name__)

STEP_ERROR: Final = error_info(InternalError("The server had an internal error while processing this request."))
MEMORY_ERROR: Final = error_info(UnavailableError("The device ran out of memory. Please retry later."))
STOP_ERROR: Final = msgspec.structs.replace(
    error_info(UnavailableError("The engine is stopping. Please retry later.")), code=ENGINE_STOPPED
)
BROKEN_ERROR: Final = msgspec.structs.replace(error_info(UnavailableError(STOPPED)), code=ENGINE_STOPPED)

_LONG_STEP_S: Final = 0.005
"""Shorter steps are dispatched at once, without listening for further requests."""
_LISTENING_SHARE: Final = 0.5
"""The share of a step's expected time to listen for. The rest is for steps that end early, and for a late host."""
_MAX_CULPRITS: Final = 2
"""Requests that fail alone, one after the other, after which the engine gives up."""
_MAX_FAILURES: Final = 32
"""Failed steps in a row after which it gives up in any case."""


@dataclass(slots=True)
class _Dispatched:
    """A step that was submitted to the device."""

    plan: Plan
    pending: Pending[Result]
    gap_s: float | None
    """The longest time that the device can have been idle before it; None if it had no work."""
    dispatched_s: float

    @property
    def program(self) -> tuple[ProgramKind, int]:
        return self.plan.kind, self.plan.bucket


@dataclass(frozen=True, slots=True)
class _NeverStarted:
    """A step that could not be submitted."""

    error: Exception

    def is_done(self) -> bool:
        return True

    def next_tokens(self) -> None:
        """Return None: there are no tokens."""

    def result(self) -> Result:
        raise self.error


class EngineCore:
    """One scheduler, one executor, and up to `depth` steps on the device whose results are not awaited yet."""

    def __init__(
        self,
        scheduler: BaseScheduler[Any, Any, Any],
        executor: Executor[Any, Result],
        *,
        depth: int = 1,
        profiler: Profiler | None = None,
        page_changes: PageChanges | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tiers: KVTiers | None = None,
        adapters: AdapterPlaces | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        """flight: records what the scheduler decides; None: it is not recorded. adapters: those that requests may use and that commands may change; None: all that requests name."""
        self._memory, self._cpu_seconds = Measured(resident_bytes), Measured(time.process_time)
        self.tiers = tiers
        """The scheduler's."""
        self.flight = flight
        self.control = EngineControl(scheduler, executor.weights, adapters=adapters, tiers=tiers, flight=flight)
        """Pauses, sleep and updates of the weights."""
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._profiler = profiler or Profiler(None)
        self.page_changes = page_changes
        """Pages that the prefix cache gains and loses; None if they are not published."""
        self._clock = clock
        self._num_failures = self._num_culprits = 0
        """Failed steps, and requests that failed alone, since the last step that succeeded."""
        self._in_flight: deque[_Dispatched] = deque()
        self._last_busy: float | None = None
        """Time at which the device last worked or had just finished, while requests were left."""
        self._last_read_s = 0.0
        self._recent_seconds: dict[tuple[ProgramKind, int], tuple[float, float]] = {}
        """Seconds per step of the last two calls of each program."""

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do: a request runs or waits and no pause holds it, or a step is in flight."""
        return bool(self._in_flight) or (self._scheduler.has_work and not self.control.state.is_paused)

    @property
    def is_broken(self) -> bool:
        """True if steps fail one after the other: the engine must stop, and be restarted."""
        return self._num_failures >= _MAX_FAILURES or self._num_culprits >= _MAX_CULPRITS

    def handle(self, message: ToEngine) -> list[RequestOutput]:
        """Take one message; returns the immediate outputs: rejections, and ends of aborted requests."""
        match message:
            case AddRequest():
                return self._add(message)
            case Abort():
                return self._scheduler.abort(message.request_ids)
            case Hello() | Command():
                pass  # the loop answers them
        return []

    def run_command(self, name: CommandName) -> ErrorInfo | None:
        """Run an operator's command; returns the error if it failed."""
        try:
            match name:
                case "reset_prefix_cache":
                    self._scheduler.reset_prefix_cache()
                case "start_profile":
                    self._profiler.start()
                case "stop_profile":
                    self._profiler.stop()
                case _:
                    raise InternalError(f"{name} is a command of `control`")
        except RequestError as error:
            return error_info(error)
        except BrokenExecutorError as error:
            _log.error("%s failed (%s): the engine ends", name, error)
            self._num_failures = _MAX_FAILURES
            return BROKEN_ERROR
        except Exception:
            _log.exception("%s failed", name)
            return STEP_ERROR
        return None

    def patience_s(self) -> float:
        """Return how long to listen for messages before `step` is due, so that its plan includes late requests."""
        if not self._in_flight or self._in_flight[-1].plan.num_steps > 1:
            return 0.0
        running = self._in_flight[-1]
        expected_s = min(self._recent_seconds.get(running.program, (0.0,)))
        if expected_s < _LONG_STEP_S or running.pending.is_done():
            return 0.0
        started_s = max(running.dispatched_s, self._last_read_s)
        return max(0.0, started_s + _LISTENING_SHARE * expected_s - self._clock())

    def step(self) -> StepOutputs | None:
        """Dispatch the next step and read the results that are due; returns their outputs, None if none were due.

        Of a call of several decode steps it returns after each whose tokens can be read before the call is done.
        """
        self._look_at_device()
        outputs, plan = self.control.poll(len(self._in_flight)), None
        if not self.control.holds_steps and len(self._in_flight) <= self._depth:
            outputs += self._scheduler.poll_grammars()
            plan = self._scheduler.schedule()
        num_kept = 0
        if plan is None:  # nothing to do, or nothing before the oldest step is done
            num_kept = max(0, len(self._in_flight) - 1)
        elif self._submit(plan):
            num_kept = self._depth
        is_due, goes_on = len(self._in_flight) > num_kept or bool(outputs), False
        while len(self._in_flight) > num_kept:
            oldest, is_last = self._in_flight[0], len(self._in_flight) == num_kept + 1
            tokens = oldest.pending.next_tokens() if is_last and oldest.plan.num_steps > 1 else None
            if tokens is not None and (taken := self._scheduler.update(oldest.plan, StepTokens(tokens))):
                outputs, goes_on = outputs + taken, True
                break
            outputs += self._read_oldest()
        if self.tiers is not None:
            self.tiers.save()
        if not is_due:
            return None
        if version := self.control.state.weight_version:
            outputs = [msgspec.structs.replace(output, weight_version=version) for output in outputs]
        return StepOutputs(outputs, None if goes_on else self._stats())

    def heartbeat(self) -> Heartbeat:
        """Return a sign of life with the numbers since the last one."""
        return Heartbeat(self._stats())

    def stop(self, error: ErrorInfo) -> StepOutputs:
        """End every request that is left with `error`; no step follows."""
        return StepOutputs(self._scheduler.abort_all(error), self._stats())

    def _add(self, message: AddRequest) -> list[RequestOutput]:
        try:
            error = self.control.rejection(message) or self._scheduler.add(message)
        except Exception:  # a bug of ours, since the request passed every check: it must not end the engine
            _log.exception("request %s could not be added", message.request_id)
            error = STEP_ERROR
        return [] if error is None else [rejected(message.request_id, error)]

    def _look_at_device(self) -> float:
        """Return the time; if the device still works, remember it as the earliest end of that work."""
        now = self._clock()
        if self._in_flight and not self._in_flight[-1].pending.is_done():
            self._last_busy = now
        return now

    def _submit(self, plan: Plan) -> bool:
        """Submit a step. Returns False if that failed; the error is raised when the result is read."""
        now = self._look_at_device()
        gap_s = None if self._last_busy is None else now - self._last_busy
        pending: Pending[Result]
        try:
            if self.tiers is not None:
                self.tiers.write()
            pending = self._executor.submit(plan)
        except Exception as error:
            pending = _NeverStarted(error)
        else:
            self._last_busy = self._clock()
        self._in_flight.append(_Dispatched(plan, pending, gap_s, now))
        return not isinstance(pending, _NeverStarted)

    def _read_oldest(self) -> list[RequestOutput]:
        step = self._in_flight.popleft()
        was_done = step.pending.is_done()
        try:
            result = step.pending.result()
        except Exception as error:  # whatever a device raises ends the requests of the step only
            for later in self._in_flight:  # they used what the failed one left
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
        self._num_failures = self._num_culprits = 0
        count_call(self._scheduler.stats, step.plan, result, step.gap_s)
        if self.tiers is not None and step.plan.kind == "mixed":
            self.tiers.rule.observe_prefill(step.plan.num_tokens, result.device_seconds)
        outputs = self._scheduler.update(step.plan, result)
        if not self._scheduler.has_work:
            self._last_busy = None
        return outputs

    def _failed(self, plan: Plan, error: Exception) -> list[RequestOutput]:
        is_broken = isinstance(error, BrokenExecutorError)
        lacks_memory = is_out_of_memory(error)
        self._num_failures = _MAX_FAILURES if is_broken else self._num_failures + 1
        reason = "memory" if lacks_memory else "error"
        stats = self._scheduler.stats
        stats.failed_steps[reason] = stats.failed_steps.get(reason, 0) + 1
        info = BROKEN_ERROR if is_broken else MEMORY_ERROR if lacks_memory else STEP_ERROR
        ends = self._scheduler.fail(plan, info, may_shrink=lacks_memory)
        self._num_culprits += len(ends)
        _log.error(
            "step %s/%d failed (%s), %s: %s",
            plan.kind,
            plan.bucket,
            error if is_broken else f"{self._num_failures} in a row",
            "the engine ends" if is_broken else "this request ends" if ends else "its requests are computed again",
            ", ".join([end.request_id for end in ends] or plan.request_ids),
            exc_info=None if is_broken else error,
        )
        return ends

    def _stats(self) -> EngineStats:
        stats = self._scheduler.take_stats()
        self._executor.add_stats(stats)
        stats.engine_cpu_seconds = self._cpu_seconds.value
        stats.engine_memory_bytes = self._memory.value
        return stats


def rejected(request_id: RequestId, error: ErrorInfo) -> RequestOutput:
    """Return the terminal message of a request that never ran."""
    return RequestOutput(request_id, [], finish_reason="error", error=error)


def count_call(stats: EngineStats, plan: Plan, result: Result, host_gap_seconds: float | None) -> None:
    """Count a call that is done, of one or several decode steps.

    host_gap_seconds: the longest time that the device can have waited for the plan; None if it had no work before.
    """
    program, num_steps = f"{plan.kind}/{plan.bucket}", result.num_steps
    stats.program_calls += 1
    stats.bucket_steps[program] = stats.bucket_steps.get(program, 0) + num_steps
    padding = stats.padding_tokens.get(plan.kind, 0)
    stats.padding_tokens[plan.kind] = padding + num_steps * plan.num_padding_tokens
    stats.iteration_tokens_total += [plan.num_tokens] * num_steps
    stats.device_step_seconds += [result.device_seconds / num_steps] * num_steps
    if host_gap_seconds is not None:
        stats.host_gap_seconds.append(host_gap_seconds)
