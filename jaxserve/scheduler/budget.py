"""Shares the tokens of a step among prompts, and starts waiting requests with them.

Every running request gets one token. The rest is shared by the scheduling policy:

    fcfs, priority    all of it in order of rank, to running and waiting requests alike
    fair              half of it in order of rank; the other half, and what is left of the first one, to the requests
                      with the fewest missing tokens, within the best priority first

So a short prompt never waits for long ones, and a long one is done after at most twice the steps that it would take in
order of rank (docs/scheduling.md has the proof). Either way no token of the budget is left while a request that can
have it misses one.

The first request in rank that gets no row or no pages, or waits for the prefix that another one computes, keeps all
requests after it from starting in order of rank. Shorter ones may still start, but no more than `max_rows` of them before
it, none if it was preempted, and none of a worse priority: the pages that it needs come together at last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from typing import Final

from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.base import discard
from jaxserve.scheduler.constrained import ConstrainedDecoding
from jaxserve.scheduler.fair_keys import FairKeys, by_rank
from jaxserve.scheduler.limits import StepLimits
from jaxserve.scheduler.request import Request
from jaxserve.scheduler.resources import Resources

_MAX_REJECTIONS: Final = 32
"""Waiting requests without pages after which a step asks for no more of the short ones."""

Length = tuple[int, int, int]
"""Priority, missing tokens, order of arrival."""


class ShortestFirst:
    """The waiting requests, those with the fewest missing tokens first within a priority.

    What a request misses is counted when it joins the queue: its known tokens but for those that the prefix cache has
    then. A prefix that is cached or evicted later changes its place no more.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._lengths: dict[Request, Length] = {}
        self._queue: list[tuple[Length, Request]] = []

    def add(self, request: Request) -> None:
        num_missing = request.num_tokens
        if not request.num_unscored:
            num_missing -= len(self._kv.find_prefix(request.table, request.tokens)) * self._kv.block_size
        length = length_of(request, num_missing)
        self._lengths[request] = length
        insort(self._queue, (length, request), key=_length)

    def remove(self, request: Request) -> None:
        length = self._lengths.pop(request, None)
        if length is not None:
            del self._queue[bisect_left(self._queue, length, key=_length)]

    def first(self, count: int) -> list[tuple[Length, Request]]:
        return self._queue[:count]


class PrefillBudget:
    """The policy that shares a step's tokens."""

    def __init__(
        self,
        limits: StepLimits,
        resources: Resources,
        constrained: ConstrainedDecoding,
        clock: Callable[[], float],
        shortest_first: ShortestFirst | None,
        fair_keys: FairKeys | None,
    ) -> None:
        """shortest_first: the waiting requests by length, fair_keys: the turns of API keys, for the policy `fair`; None for the others."""
        self._fair_keys = fair_keys
        self._limits = limits
        self._resources = resources
        self._constrained = constrained
        self._clock = clock
        self._shortest_first = shortest_first
        self._blocked: Request | None = None
        """The first request in rank that could not start when it was its turn, until it starts or ends."""
        self._num_overtakers = 0
        """Requests that started before `_blocked` since then."""

    def missing(self, running: Sequence[Request]) -> list[int]:
        """Return the tokens that each running request misses.

        Zero for a request that an unread token ends by its length, or that has no mask yet.
        """
        return [self._missing(request) for request in running]

    def share(
        self, running: list[Request], waiting: list[Request], missing: Sequence[int], *, may_start: bool
    ) -> tuple[list[int], list[Request]]:
        """Return the tokens of the next step for each running request, and the requests that start with it.

        These are moved from `waiting` to `running`. missing: as the method of this name returns it.
        """
        if not waiting and max(missing, default=0) <= 1:  # only decodes
            return list(missing), []
        step = _Step(running, waiting, self._limits.max_tokens, missing)
        ranked = step.num_left if self._shortest_first is None else step.num_left - step.num_left // 2
        self._share_by_rank(step, ranked, may_start=may_start)
        if self._shortest_first is not None:
            self._share_by_length(step, self._shortest_first, may_start=may_start)
        return [step.counts[request] for request in running], step.started

    def _missing(self, request: Request) -> int:
        length = request.num_tokens + request.num_unread_tokens
        if length >= request.length_limit or (request.grammar is not None and self._constrained.is_late(request)):
            return 0
        return length - request.num_computed_tokens

    def _share_by_rank(self, step: _Step, budget: int, *, may_start: bool) -> None:
        budget_after = step.num_left - budget
        blocked = None
        prefilling = [request for request in step.running if step.missing[request]]
        for request in merge(prefilling, step.waiting[: self._limits.max_rows], key=by_rank):
            if step.num_left <= budget_after:
                break
            if self._is_row_kept(step, request):
                continue
            if request.slot is None and (blocked or not may_start or not self._start(step, request)):
                blocked = blocked or request
                continue
            step.grant(request, step.num_left - budget_after)
        self._note_blocked(blocked)

    def _note_blocked(self, blocked: Request | None) -> None:
        """Remember the first request that could not start; None if none was asked, or all that were have started."""
        last = self._blocked
        if blocked is None and last is not None and last.slot is None and last.finish_reason is None:
            return  # the budget did not reach it in this step
        if blocked is not last:
            self._blocked, self._num_overtakers = blocked, 0

    def _share_by_length(self, step: _Step, shortest_first: ShortestFirst, *, may_start: bool) -> None:
        num_rejections, blocked = 0, self._blocked
        prefilling = [(length_of(request, missing), request) for request, missing in step.missing.items() if missing]
        shortest = shortest_first.first(self._limits.max_rows + _MAX_REJECTIONS)
        for _, request in merge(sorted(prefilling, key=_length), shortest, key=_length):
            if not step.num_left:
                break
            if self._is_row_kept(step, request):
                continue
            if request.slot is None:
                if not may_start or (blocked is not None and not self._may_overtake(request, blocked)):
                    continue
                if not self._start(step, request):
                    num_rejections += 1
                    may_start = num_rejections < _MAX_REJECTIONS
                    blocked = blocked or request
                    continue
                self._num_overtakers += self._blocked is not None and self._blocked is not request
            step.grant(request, step.num_left)

    def _may_overtake(self, request: Request, blocked: Request) -> bool:
        is_due = blocked.num_preemptions > 0 or self._num_overtakers >= self._limits.max_rows
        return request is blocked or (request.rank[0] <= blocked.rank[0] and not is_due)

    def _is_row_kept(self, step: _Step, request: Request) -> bool:
        """Return True if a waiting request may not have the row that is left, which is for other API keys."""
        if request.slot is not None or self._fair_keys is None:
            return False
        return self._fair_keys.keeps_row(request, step.running, self._limits.max_rows)

    def _start(self, step: _Step, request: Request) -> bool:
        """Start a waiting request if it gets a row and pages. The cache is asked now: it may have more pages."""
        if len(step.running) >= self._limits.max_rows or self._constrained.is_late(
            request
        ):  # late: it was just preempted
            return False
        if not self._resources.start(request, len(step.running), self._clock()):
            return False
        self._constrained.start(request)
        if self._shortest_first is not None:
            self._shortest_first.remove(request)
        step.start(request)
        return True


class _Step:
    """The tokens of one step while they are shared."""

    def __init__(self, running: list[Request], waiting: list[Request], max_tokens: int, missing: Iterable[int]) -> None:
        self.running = running
        self.waiting = waiting
        self.started: list[Request] = []
        self.counts = {request: min(num, 1) for request, num in zip(running, missing, strict=True)}
        self.missing = {request: max(num - 1, 0) for request, num in zip(running, missing, strict=True)}
        """Tokens that requests of `running` miss beyond their counts."""
        self.num_left = max_tokens - sum(self.counts.values())

    def grant(self, request: Request, budget: int) -> None:
        """Give `request` as many tokens as it misses, at most `budget`."""
        count = min(self.missing[request], budget)
        self.counts[request] += count
        self.missing[request] -= count
        self.num_left -= count

    def start(self, request: Request) -> None:
        """Move a request that got its slot from the waiting to the running ones."""
        discard(self.waiting, request)
        insort(self.running, request, key=by_rank)
        self.started.append(request)
        self.counts[request] = 0
        self.missing[request] = request.num_tokens - request.num_computed_tokens


def length_of(request: Request, num_missing: int) -> Length:
    priority, _, arrival = request.rank
    return priority, num_missing, arrival


def _length(entry: tuple[Length, Request]) -> Length:
    return entry[0]
