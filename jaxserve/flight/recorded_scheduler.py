"""A scheduler whose calls are recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from jaxserve.config import SchedulerConfig
from jaxserve.flight.recorder import (
    HASH_BYTES,
    Arrival,
    Event,
    KeptEvents,
    KeptResult,
    Recorder,
    Scheduled,
)
from jaxserve.ipc.messages import AddRequest, ErrorInfo, RequestOutput
from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.constrained import Grammars
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult, StepTokens
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import RequestId


class RecordedScheduler(Scheduler):
    """A Scheduler without tiers and images, and the recorder that keeps what it decides."""

    def __init__(
        self,
        recorder: Recorder,
        config: SchedulerConfig,
        kv: KVManager,
        buckets: Buckets,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(config, kv, buckets, max_model_len, eos_token_ids, vocab_size, recorder.clock(clock), grammars)
        self._recorder = recorder
        recorder.begin_step(self)

    def add(self, message: AddRequest) -> ErrorInfo | None:
        add = super().add

        def complete(event: Event, error: ErrorInfo | None) -> int | None:
            if error is not None:
                return None
            table = self.requests[message.request_id].table
            event.value.chain = table.chain
            num_tokens = len(message.prompt_token_ids) + message.sampling.max_tokens
            return HASH_BYTES * min(self._kv.num_blocks_for(num_tokens), len(table.row))

        return self._recorder.call("add", Arrival.of(message), lambda: add(message), complete)

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        abort, ids = super().abort, list(request_ids)
        return self._recorder.call("abort", ids, lambda: abort(ids))

    def abort_all(self, error: ErrorInfo) -> list[RequestOutput]:
        abort_all = super().abort_all
        return self._recorder.call("abort_all", None, lambda: abort_all(error))

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, weights_name: str | None = None) -> None:
        assert weights_name is None, "weights have names for tiers, with which nothing is recorded"
        reset = super().reset_prefix_cache
        self._recorder.call(
            "reset_prefix_cache", reset_running_requests, lambda: reset(reset_running_requests=reset_running_requests)
        )

    def poll_grammars(self) -> list[RequestOutput]:
        constrained = self._constrained
        if not constrained:
            return []
        constrained.last_events = None

        def complete(event: Event, _: list[RequestOutput]) -> int | None:
            if constrained.last_events is None:  # the call has not asked
                return None
            event.value = KeptEvents.of(constrained.last_events)
            return 0

        return self._recorder.call("poll_grammars", None, super().poll_grammars, complete)

    def schedule(self) -> StepPlan | None:
        def complete(event: Event, plan: StepPlan | None) -> int | None:
            if plan is not None:
                return self._recorder.complete_plan(event, plan)
            is_idle = not self.requests and not self.in_flight
            return None if is_idle else 0

        self._recorder.begin_step(self)
        return self._recorder.call("schedule", Scheduled(self.starts_requests), super().schedule, complete)

    def update(self, plan: StepPlan, result: StepResult | StepTokens) -> list[RequestOutput]:
        update = super().update
        if isinstance(result, StepTokens):
            size = result.token_ids.nbytes
            return self._recorder.call("take_tokens", result, lambda: update(plan, result), lambda event, outputs: size)
        kept = KeptResult.of(result)
        num_bytes = kept.token_ids.nbytes
        return self._recorder.call("update", kept, lambda: update(plan, result), lambda event, outputs: num_bytes)

    def fail(self, plan: StepPlan, error: ErrorInfo, *, may_shrink: bool = False) -> list[RequestOutput]:
        fail = super().fail
        return self._recorder.call("fail", may_shrink, lambda: fail(plan, error, may_shrink=may_shrink))
