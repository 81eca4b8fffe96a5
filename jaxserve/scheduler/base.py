"""The base of the schedulers for tokens and for embeddings: queue, steps in flight, ends and numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from jaxserve.errors import InvalidRequestError, RequestError
from jaxserve.ipc.messages import AddRequest, ErrorInfo, RequestOutput
from jaxserve.ipc.stats import EngineStats
from jaxserve.scheduler.admission import Admission, EmbedAdmission, error_info
from jaxserve.scheduler.fair_keys import FairKeys, KeyedRequest, Rank, by_rank
from jaxserve.scheduler.isolation import Isolation
from jaxserve.scheduler.plan import Plan, Result
from jaxserve.types import FinishReason, RequestId


class Ranked(KeyedRequest, Protocol):
    """A request in a queue."""

    @property
    def request_id(self) -> RequestId: ...


R = TypeVar("R", bound=Ranked)
P = TypeVar("P", bound=Plan)
T = TypeVar("T", bound=Result)


class BaseScheduler(ABC, Generic[R, P, T]):
    """Turns requests `R` into plans `P`, and results `T` into outputs."""

    def __init__(
        self, admission: Admission | EmbedAdmission, clock: Callable[[], float], fair_keys: FairKeys | None
    ) -> None:
        """fair_keys: shares the engine between API keys; None: requests go in order of arrival."""
        self._fair_keys = fair_keys
        self.stats = EngineStats()
        """The numbers since the last `take_stats`; the engine counts its steps here too."""
        self._admission = admission
        self._clock = clock
        self.requests: dict[RequestId, R] = {}
        """Requests that have not ended, in order of arrival."""
        self.running: list[R] = []
        """Requests that take part in steps, in order of rank."""
        self.waiting: list[R] = []
        """Requests that can start, in order of rank."""
        self.in_flight: deque[tuple[P, list[R]]] = deque()
        """Submitted steps and their requests by row, oldest first."""
        self.num_landed = 0
        """Decode steps of the oldest plan in flight whose tokens were taken before its result."""
        self.starts_requests = True
        """False: no waiting request starts."""
        self._num_arrivals = 0
        self._isolation: Isolation[R]
        """Made by the subclass, like the next one."""
        self._lose: Callable[[P, bool], bool] = lambda plan, may_shrink: False
        """Takes back all that requests hold of the device, which has lost it with a plan. Returns True if steps are smaller
        than this plan from now on, which they may be if the second argument is true."""

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or a step is in flight."""
        return bool(self.requests or self.in_flight)

    def add(self, message: AddRequest) -> ErrorInfo | None:
        """Queue a request; returns the error of one that is rejected."""
        error: RequestError | None
        if message.request_id in self.requests:
            error = InvalidRequestError(f"request id {message.request_id!r} is in use", param="request_id")
        else:
            error = self._admission.rejection(message, len(self.requests))
        if error is not None:
            return error_info(error)
        rank = (message.priority, 0, self._num_arrivals)
        if self._fair_keys is not None:
            self._fair_keys.close_gaps(self.requests.values(), self.waiting)
            rank = self._fair_keys.rank(message, self._num_arrivals, self.waiting)
        self.requests[message.request_id] = self._queue(message, rank)
        self._num_arrivals += 1
        return None

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """End these requests now. Ids of requests that have ended are skipped."""
        found = [self.requests.get(request_id) for request_id in dict.fromkeys(request_ids)]
        return [self._end(request, "abort") for request in found if request is not None]

    def abort_all(self, error: ErrorInfo) -> list[RequestOutput]:
        """End every request with `error`: the engine stops."""
        return [self._end(request, "error", error) for request in list(self.requests.values())]

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, weights_name: str | None = None) -> None:
        """Forget every cached page that no request holds, if there are pages.

        reset_running_requests: preempt all running requests first, so that no page is left on the device; no step may be in flight.
        weights_name: give pages hashes of their own from now on, for weights of this name; no request may run. Tiers keep their pages
        in these two cases, and forget them otherwise.
        """

    def poll_grammars(self) -> list[RequestOutput]:
        """Apply what grammars have done, if there are any; returns tokens and ends. Call it before `schedule`."""
        return []

    @abstractmethod
    def schedule(self) -> P | None:
        """Return the next step; None if there is none, or none before the oldest step in flight is updated.

        Answer plans in their order, each with `update`, or the oldest with `fail`.
        """

    @abstractmethod
    def update(self, plan: P, result: T) -> list[RequestOutput]:
        """Take the result of the oldest step in flight; returns outputs of its requests."""

    def fail(self, plan: P, error: ErrorInfo, *, may_shrink: bool = False) -> list[RequestOutput]:
        """Compute all running requests again, since `plan`, the oldest step in flight, failed; end the culprit if it is known.

        may_shrink: True if a smaller step might not fail.
        """
        rows = dict.fromkeys(self._land(plan))
        rows |= dict.fromkeys(self.requests[each] for each in plan.encoded_ids if each in self.requests)
        while self.in_flight:
            self._land(self.in_flight[0][0])
        is_smaller = self._lose(plan, may_shrink)
        others = [*self.running, *self.waiting]
        self.running, self.waiting = [], []
        live = [request for request in rows if self.requests.get(request.request_id) is request]
        culprit = self._isolation.fail([] if is_smaller else live, others)
        return [] if culprit is None else [self._end(culprit, "error", error)]

    def take_stats(self) -> EngineStats:
        """Return gauges as they are, and counters since the last call."""
        stats, self.stats = self.stats, EngineStats()
        stats.num_requests_running = len(self.running)
        stats.num_requests_waiting = num_waiting = len(self.requests) - len(self.running)
        num_ready = len(self.waiting) + len(self._isolation.held)
        stats.num_requests_waiting_by_reason = {"capacity": num_ready, "deferred": num_waiting - num_ready}
        return stats

    @abstractmethod
    def _queue(self, message: AddRequest, rank: Rank) -> R:
        """Return the new request, which waits from now on."""

    @abstractmethod
    def _end(self, request: R, reason: FinishReason, error: ErrorInfo | None = None) -> RequestOutput:
        """End `request` without a result."""

    def _land(self, plan: P) -> list[R]:
        """Take `plan`, which must be the oldest, from the steps in flight; returns its requests by row."""
        if not self.in_flight or self.in_flight[0][0] is not plan:
            raise RuntimeError("this plan is not the oldest step in flight")
        self.num_landed = 0
        return self.in_flight.popleft()[1]

    def _remove(self, request: R) -> None:
        del self.requests[request.request_id]
        self._isolation.forget(request)
        if not discard(self.waiting, request):
            discard(self.running, request)


def discard(line: list[R], request: R) -> bool:
    """Remove `request` from requests in order of rank; False if it is not among them."""
    place = bisect_left(line, request.rank, key=by_rank)
    if place == len(line) or line[place] is not request:
        return False
    del line[place]
    return True
