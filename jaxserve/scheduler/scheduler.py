"""Who computes what in the next step.

There are no phases. A request knows `num_tokens` tokens and has computed `num_computed_tokens` of them;
every step spends a budget of tokens on letting requests catch up, and a request that has caught up
gets one new token. Chunked prefill, prefix-cache hits and preemption are this one rule:

    decoding            one token behind, catches up every step
    chunked prefill     far behind, catches up by what the budget leaves
    prefix-cache hit    starts with `num_computed_tokens` > 0
    preemption          `num_computed_tokens` back to 0, tokens kept: the same text goes on later

Order is rank: lower `priority` first, then arrival. One list of running requests and one of waiting
ones, both in that order. One step is

    1. share the budget: every running request gets one token, what is left goes to those behind, in order;
    2. secure pages, in order: when the pool is dry the last running request gives its pages back and waits;
    3. start waiting requests, in order, while rows, budget and pages last (not right after a preemption);
    4. pack the rows into a program.

Nobody starves: rows never exceed the budget, so every running request moves every step; the first in
rank is never preempted; nobody overtakes in the queue; and what can never fit is refused at the door.

The scheduler is a function of its state, the calls it gets and the clock it is given: no randomness, no
I/O. The clock is only read for what is reported; no decision hangs on it.

Steps in flight. Today a plan is updated before the next one is made, and `schedule` insists on it. What
an overlapping engine needs beside that is kept apart already: `update` and `fail` are handed the plan
they answer; results meet the `Request` objects of that plan, not ids that may have been used again; and
pages which a step under way may write (`Request.is_in_flight`) return to the pool when it is done.
"""

from __future__ import annotations

import time
from bisect import bisect, insort
from collections.abc import Callable, Iterable

from jaxserve.config import SchedulerConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import AddRequest, EngineStats, RequestFault, RequestOutput, TokenLogprobs
from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.admission import Admission, fault_of
from jaxserve.scheduler.counters import Counters
from jaxserve.scheduler.packing import pack
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult
from jaxserve.scheduler.request import Request
from jaxserve.types import FinishReason, RequestId


class Scheduler:
    """The requests of one engine and their pages."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        buckets: Buckets,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The limits are those of the buckets, and the config's where it names smaller ones."""
        self._kv = kv
        self._clock = clock
        self._buckets = buckets
        self._eos_token_ids = eos_token_ids
        self._max_tokens = min(max(buckets.mixed), config.max_num_batched_tokens or max(buckets.mixed))
        largest = min(buckets.max_num_seqs, max(buckets.decode), self._max_tokens)
        self._max_rows = min(largest, config.max_num_seqs or largest)
        self._admission = Admission(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            num_usable_tokens=kv.num_usable_tokens,
            max_requests=self._max_rows + config.max_queued_requests,
        )
        self._requests: dict[RequestId, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._in_flight: tuple[StepPlan, list[Request]] | None = None
        self._num_arrivals = 0
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def running(self) -> tuple[Request, ...]:
        """In order of rank."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """In order of rank."""
        return tuple(self._waiting)

    @property
    def in_flight(self) -> tuple[Request, ...]:
        """Requests of the step under way, among them such that ended meanwhile."""
        return () if self._in_flight is None else tuple(self._in_flight[1])

    def add(self, message: AddRequest) -> RequestFault | None:
        """Queue a request, or say why not. A refused request leaves no trace."""
        if message.request_id in self._requests:
            return fault_of(InvalidRequestError(f"request id {message.request_id!r} is in use", param="request_id"))
        refusal = self._admission.refusal(message, len(self._requests))
        if refusal is None:
            table = self._kv.new_table(message.cache_salt)
            limit = self._admission.max_output_tokens(message)
            request = Request(message, table, limit, self._num_arrivals, self._clock())
            self._num_arrivals += 1
            self._requests[request.request_id] = request
            insort(self._waiting, request, key=_rank)
        return refusal

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """End these requests now. Unknown ids are skipped: they ended while the abort was on its way."""
        found = [
            self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests
        ]
        return [self._end(request, "abort") for request in found]

    def abort_all(self, fault: RequestFault) -> list[RequestOutput]:
        """End everything with `fault`: the engine stops."""
        return [self._end(request, "error", fault) for request in list(self._requests.values())]

    def reset_prefix_cache(self) -> None:
        """Forget every cached page that no request holds."""
        self._kv.reset_prefix_cache()

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing waits or runs. Answer it with `update` or `fail`."""
        if self._in_flight is not None:
            raise RuntimeError("the step in flight has to be updated before the next one is scheduled")
        counts = self._share_budget()
        num_running = len(counts)
        self._secure_pages(counts)
        if len(counts) == num_running:  # nobody goes and comes back in one step: tables change only by growing
            self._start_waiting(counts)
        if not counts:
            return None
        plan, requests = pack(self._running, counts, self._buckets)
        for request in requests:
            request.is_in_flight = True
        self._in_flight = (plan, requests)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what a step computed: progress, published pages, new tokens, finished requests."""
        outputs = []
        requests = self._land(plan)
        counts, is_sampling = plan.num_scheduled_tokens.tolist(), plan.is_sampling.tolist()
        tokens = result.token_ids.tolist()
        for row, request in enumerate(requests):
            if request.finish_reason is None:
                request.num_computed_tokens += counts[row]
                self._kv.publish(request.table, request.tokens, request.num_computed_tokens)
                if is_sampling[row]:
                    outputs.append(self._accept(request, tokens[row], _logprobs(request, result, row)))
        return outputs

    def fail(self, plan: StepPlan, fault: RequestFault) -> list[RequestOutput]:
        """End the requests of a step that failed: all that run. Those that wait go on.

        Nothing the step may have left in the pages is used again: cached ones are forgotten.
        """
        requests = self._land(plan)
        outputs = [self._end(request, "error", fault) for request in requests if request.finish_reason is None]
        self._kv.reset_prefix_cache()
        return outputs

    def stats(self) -> EngineStats:
        """Gauges as they are; counters since the last call."""
        counters, self._counters = self._counters, Counters()
        return counters.stats(len(self._running), len(self._waiting), self._kv.usage)

    # --- one step -------------------------------------------------------------------------------------

    def _share_budget(self) -> list[int]:
        """Tokens for each running request: `counts[i]` belongs to `_running[i]`, here and below."""
        spare = self._max_tokens - len(self._running)
        counts = []
        for request in self._running:
            num_behind = request.num_tokens - request.num_computed_tokens
            count = min(num_behind, 1 + spare)
            spare -= count - 1
            counts.append(count)
        return counts

    def _secure_pages(self, counts: list[int]) -> None:
        """Give every running request the pages for its tokens, at the cost of the last ones if need be."""
        i = 0
        while i < len(counts):
            request = self._running[i]
            while not self._kv.extend(request.table, request.num_computed_tokens + counts[i]):
                counts.pop()
                self._preempt_last()
                if len(counts) == i:  # the request was the last one itself
                    return
            i += 1

    def _preempt_last(self) -> None:
        victim = self._running.pop()
        self._kv.free(victim.table)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        insort(self._waiting, victim, key=_rank)
        self._counters.num_preemptions += 1

    def _start_waiting(self, counts: list[int]) -> None:
        """Let waiting requests in. The cache is asked now, not at arrival: it may have learnt since."""
        budget = self._max_tokens - sum(counts)
        while self._waiting and budget > 0 and len(counts) < self._max_rows:
            request = self._waiting[0]
            # A spare page for each running request: else the newcomer, the last in rank, would soon give its
            # pages back, and a request just preempted would take its own back from those who needed them.
            num_cached = self._kv.start(request.table, request.tokens, num_spare_blocks=len(counts))
            if num_cached is None:
                return
            del self._waiting[0]
            request.num_computed_tokens = num_cached
            if request.queue_seconds is None:
                request.queue_seconds = self._clock() - request.arrival_s
                request.num_cached_tokens = num_cached
                self._counters.count_prefix(request.num_prompt_tokens, num_cached)
            count = min(request.num_tokens - num_cached, budget)
            budget -= count
            place = bisect(self._running, request.rank, key=_rank)
            self._running.insert(place, request)
            counts.insert(place, count)

    # --- after a step ---------------------------------------------------------------------------------

    def _land(self, plan: StepPlan) -> list[Request]:
        """The requests of a plan whose step is over. Pages of those that ended meanwhile are free now."""
        if self._in_flight is None or self._in_flight[0] is not plan:
            raise RuntimeError("this plan is not the step in flight")
        requests = self._in_flight[1]
        self._in_flight = None
        for request in requests:
            request.is_in_flight = False
            if request.finish_reason is not None:
                self._kv.free(request.table)
        return requests

    def _accept(self, request: Request, token: int, logprobs: list[TokenLogprobs] | None) -> RequestOutput:
        """A new token of `request`, which may be its last."""
        request.append(token)
        self._counters.num_generation_tokens += 1
        if request.num_output_tokens == 1:
            self._counters.num_prompt_tokens += request.num_prompt_tokens
        reason, stop_token_id = self._verdict(request, token)
        if reason is not None:
            self._remove(request, reason)
        return RequestOutput(
            request.request_id,
            [token],
            logprobs,
            reason,
            stop_token_id,
            request.num_cached_tokens,
            queue_seconds=request.queue_seconds,
            num_preemptions=request.num_preemptions,
        )

    def _verdict(self, request: Request, token: int) -> tuple[FinishReason | None, int | None]:
        if token in self._eos_token_ids and not request.sampling.ignore_eos:
            return "stop", None
        if token in request.stop_token_ids:
            return "stop", token
        if request.num_output_tokens >= request.max_output_tokens:
            return "length", None
        return None, None

    def _end(self, request: Request, reason: FinishReason, fault: RequestFault | None = None) -> RequestOutput:
        """End `request` without a token."""
        self._remove(request, reason)
        return RequestOutput(
            request.request_id,
            [],
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            error=fault,
            num_preemptions=request.num_preemptions,
        )

    def _remove(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.request_id]
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        if not request.is_in_flight:
            self._kv.free(request.table)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _logprobs(request: Request, result: StepResult, row: int) -> list[TokenLogprobs] | None:
    wanted = request.sampling.num_top_logprobs
    if wanted is None:
        return None
    return [
        TokenLogprobs(
            float(result.logprobs[row]),
            result.top_token_ids[row, :wanted].tolist(),
            result.top_logprobs[row, :wanted].tolist(),
        )
    ]
