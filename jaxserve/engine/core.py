"""The engine without its surroundings: messages in, steps done, news out. No sockets, no signals.

Promises: every AddRequest given to `handle` ends in exactly one terminal RequestOutput; no message and
no failing step raises here. A failed step ends its own requests and the engine goes on; when the next
step fails as well, the device is taken for broken and `is_broken` tells the loop to give up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from jaxserve.engine.meter import StepMeter
from jaxserve.errors import InternalError, UnavailableError
from jaxserve.executor.protocol import Executor
from jaxserve.ipc.messages import (
    Abort,
    AddRequest,
    EngineStats,
    Heartbeat,
    Hello,
    RequestFault,
    RequestOutput,
    ResetPrefixCache,
    StepOutputs,
    ToEngine,
)
from jaxserve.scheduler.admission import fault_of
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import RequestId

_log = logging.getLogger(__name__)

STEP_FAULT: Final = fault_of(InternalError("The server had an internal error while processing this request."))
MEMORY_FAULT: Final = fault_of(UnavailableError("The device ran out of memory. Please retry later."))
STOP_FAULT: Final = fault_of(UnavailableError("The engine is stopping. Please retry later."))

_MAX_FAILURES: Final = 2
"""Failed steps in a row after which the engine gives up."""


class EngineCore:
    """One scheduler, one executor, one step at a time."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._meter = StepMeter()
        self._num_failures = 0
        self._device_idle_since: float | None = None
        """When the device had done all it was given, while requests were left."""

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
            case ResetPrefixCache():
                self._scheduler.reset_prefix_cache()
            case Hello():
                pass  # the loop introduces us
        return []

    def step(self) -> StepOutputs | None:
        """One step of whatever there is to do; None when there is nothing."""
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        gap = None if self._device_idle_since is None else self._clock() - self._device_idle_since
        try:
            # Overlap goes here: submit this plan, then read the result of the one before.
            result = self._executor.submit(plan).result()
        except Exception as error:  # whatever a device raises: the requests of the step pay, nobody else
            outputs = self._failed(plan, error)
            self._device_idle_since = None
        else:
            idle_since = self._clock()
            outputs = self._done(plan, result, gap)
            self._device_idle_since = idle_since if self._scheduler.has_work else None
        return StepOutputs(outputs, self._stats())

    def heartbeat(self) -> Heartbeat:
        """A sign of life with the numbers since the last one."""
        return Heartbeat(self._stats())

    def stop(self, fault: RequestFault) -> StepOutputs:
        """End every request that is left with `fault`."""
        return StepOutputs(self._scheduler.abort_all(fault), self._stats())

    def _add(self, message: AddRequest) -> list[RequestOutput]:
        try:
            fault = self._scheduler.add(message)
        except Exception:  # a request that passed every check and still breaks us is our fault, not the engine's end
            _log.exception("request %s could not be added", message.request_id)
            fault = STEP_FAULT
        return [] if fault is None else [refused(message.request_id, fault)]

    def _done(self, plan: StepPlan, result: StepResult, host_gap_seconds: float | None) -> list[RequestOutput]:
        self._num_failures = 0
        self._meter.record(plan, result.device_seconds, host_gap_seconds)
        return self._scheduler.update(plan, result)

    def _failed(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
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
        return self._scheduler.fail(plan, MEMORY_FAULT if is_out_of_memory else STEP_FAULT)

    def _stats(self) -> EngineStats:
        meter, self._meter = self._meter, StepMeter()
        return meter.add_to(self._scheduler.stats(), self._executor.compilations())


def refused(request_id: RequestId, fault: RequestFault) -> RequestOutput:
    """The terminal message of a request that never ran."""
    return RequestOutput(request_id, [], finish_reason="error", error=fault)
