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
    3. start waiting requests, in order, while rows, budget and pages last (not right after a preemption); one whose
       prompt is just being computed, as another choice of `n`, waits to share it, and those behind it wait too;
    4. pack the rows into a program.

Nobody starves: rows never exceed the budget, so every running request moves every step; the first in
rank is never preempted; nobody overtakes in the queue; and what can never fit is refused at the door.

The scheduler is a function of its state, the calls it gets and the clock it is given: no randomness, no
I/O. The clock is only read for what is reported; of time, only what results say of step times decides
anything: how long a burst may be.

Steps in flight. `schedule` may be called before the last plan is updated. A request that samples in a
step under way has a token that only the device knows: it counts towards its length (`num_unread_tokens`)
and the next plan says UNREAD_TOKEN for it. What the host cannot know costs at most one row of one step: a
request that ended by a token goes on once more, and the result is dropped. What needs the pages to be at
rest waits until nothing is in flight: preemption, and everything behind a burst, which may end early.
While a request with a grammar has its newest token in flight no step is dispatched, since its mask depends on
that token: as long as such requests run, steps do not overlap. The same goes for requests that could have a draft.
Pages return to the pool when no submitted step can write them any more (`Request.num_in_flight`). Slots
are free at once, since steps run in order and a new request writes its slot before it reads it.
"""

from __future__ import annotations

import time
from bisect import bisect, bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

from jaxserve.config import SchedulerConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import AddRequest, EngineStats, ErrorInfo, RequestOutput, TokenLogprobs
from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.admission import Admission, error_info
from jaxserve.scheduler.constrained import ConstrainedRequests
from jaxserve.scheduler.counters import Counters
from jaxserve.scheduler.drafting import Drafter, by_request, confirmed, with_drafts
from jaxserve.scheduler.grammars import Grammars
from jaxserve.scheduler.multi_step import MultiStepPolicy
from jaxserve.scheduler.outputs import append, ending, logprobs_of, news, prompt_logprobs_of
from jaxserve.scheduler.packing import pack, share_budget
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult
from jaxserve.scheduler.request import Request
from jaxserve.types import FinishReason, RequestId

_rank = attrgetter("rank")


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
        grammars: Grammars | None = None,
    ) -> None:
        """The limits are those of the buckets, and the config's where it names smaller ones.

        grammars: None refuses requests that have one.
        """
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
            has_grammars=grammars is not None,
        )
        self._requests: dict[RequestId, Request] = {}
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        self._constrained = ConstrainedRequests(grammars)
        self._news: list[RequestOutput] = []
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self._free_slots = list(range(buckets.max_num_seqs - 1, -1, -1))
        self._burst = MultiStepPolicy(buckets.max_decode_steps, config.max_burst_ms / 1000)
        self._drafter = Drafter(config.num_speculative_tokens, self._max_rows)
        self._num_arrivals = 0
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        """Requests that have not ended, or steps whose results nobody has taken in."""
        return bool(self._requests or self._in_flight)

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
        """Requests of the steps under way, among them such that ended meanwhile."""
        return tuple(dict.fromkeys(request for _, requests in self._in_flight for request in requests))

    def add(self, message: AddRequest) -> ErrorInfo | None:
        """Queue a request, or say why not. A refused request leaves no trace."""
        if message.request_id in self._requests:
            return error_info(InvalidRequestError(f"request id {message.request_id!r} is in use", param="request_id"))
        rejection = self._admission.rejection(message, len(self._requests))
        if rejection is None:
            table = self._kv.new_table(message.cache_salt, message.adapter)
            limit = self._admission.max_output_tokens(message)
            grammar = self._constrained.follow(message)
            request = Request(message, table, limit, self._num_arrivals, self._clock(), self._eos_token_ids, grammar)
            self._drafter.admit(request)
            self._num_arrivals += 1
            self._requests[request.request_id] = request
            if grammar is None:
                insort(self._waiting, request, key=_rank)
            else:
                self._constrained.add(request)
        return rejection

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """End these requests now. Unknown ids are skipped: they ended while the abort was on its way."""
        found = [
            self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests
        ]
        return [self._end(request, "abort") for request in found]

    def abort_all(self, error: ErrorInfo) -> list[RequestOutput]:
        """End everything with `error`: the engine stops."""
        return [self._end(request, "error", error) for request in list(self._requests.values())]

    def reset_prefix_cache(self) -> None:
        """Forget every cached page that no request holds."""
        self._kv.reset_prefix_cache()

    def schedule(self) -> StepPlan | None:
        """The next step; None when there is none, or none before the oldest step in flight is updated.

        Answer plans in their order, each with `update`, or the oldest with `fail`.
        """
        if self._in_flight and self._in_flight[-1][0].num_steps > 1:
            return None
        if self._drafter.waits_for(self._running) or (self._constrained and not self._settle_grammars()):
            return None
        counts = share_budget(self._running, self._max_tokens)
        num_running = len(counts)
        if not self._secure_pages(counts):
            return None
        newcomers = []
        if len(counts) == num_running:  # nobody goes and comes back in one step: tables change only by growing
            newcomers = self._start_waiting(counts)
        if not any(counts):
            return None
        drafts = self._drafter.draft(self._running, counts, self._kv.extend)
        num_steps = 1 if drafts else self._burst_length(counts)
        plan, requests = pack(self._running, counts, self._buckets, num_steps, newcomers)
        if drafts:
            plan, requests = with_drafts(plan, requests, drafts, self._buckets)
        for request, count, samples in zip(
            requests, plan.num_scheduled_tokens.tolist(), plan.is_sampling.tolist(), strict=True
        ):
            request.num_in_flight += 1
            request.num_computed_tokens += count + num_steps - 1
            if samples:
                request.num_unread_tokens += num_steps
        self._in_flight.append((plan, requests))
        return plan

    def take_outputs(self) -> list[RequestOutput]:
        """What grammars made of requests in `schedule`, since this was asked last: tokens without choice, ends."""
        found, self._news = self._news, []
        return found

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in what the oldest step in flight computed: new tokens, published pages, finished requests."""
        outputs = []
        self._burst.observe(plan, result)
        requests = self._land(plan)
        is_sampling = plan.is_sampling.tolist()
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        rows = result.token_ids.T.tolist()  # tokens by row
        for request, row, num_rows in by_request(requests):
            if request.finish_reason is not None:
                continue
            scores = None
            if plan.targets is not None:
                scores = prompt_logprobs_of(request, plan, result, row)
                request.num_unscored -= len(scores or ())
            if is_sampling[row]:
                tokens = rows[row]
                if num_rows > 1:
                    tokens = confirmed(plan, result, row, num_rows)
                    self._drafter.learn(request, len(tokens) - 1, num_rows - len(tokens))
                    self._counters.count_draft(num_rows - 1, len(tokens) - 1)
                request.num_unread_tokens -= plan.num_steps * num_rows
                request.num_computed_tokens -= plan.num_steps * num_rows - len(tokens)
                outputs.append(self._accept(request, tokens, result, slice(row, row + num_rows), scores))
                continue
            self._kv.publish(request.table, request.tokens, ends[row])
            if scores is not None:
                outputs.append(news(request, [], None, None, None, scores))
        return outputs

    def fail(self, plan: StepPlan, error: ErrorInfo) -> list[RequestOutput]:
        """End the requests of a step that failed and of the later ones in flight: all that run. Those that wait go on.

        Nothing the steps may have left in the pages is used again: cached ones are forgotten.
        """
        self._land(plan)
        while self._in_flight:
            self._land(self._in_flight[0][0])
        outputs = [self._end(request, "error", error) for request in tuple(self._running)]
        self._kv.reset_prefix_cache()
        return outputs

    def stats(self) -> EngineStats:
        """Gauges as they are; counters since the last call."""
        counters, self._counters = self._counters, Counters()
        return counters.stats(len(self._running), len(self._waiting), self._kv.usage)

    # --- grammars -------------------------------------------------------------------------------------

    def _settle_grammars(self) -> bool:
        """Act on what became of the grammars; False when the step has to wait for one in flight."""
        settled = self._constrained.settle(self._running, is_idle=not self._waiting)
        if settled is None:
            return False
        for request in settled.prepared:
            insort(self._waiting, request, key=_rank)
        self._news += [self._jump(request, tokens) for request, tokens in settled.forced]
        self._news += [self._end(request, "stop") for request in settled.over if request.finish_reason is None]
        self._news += [self._end(request, "error", error) for request, error in settled.failed]
        return True

    def _jump(self, request: Request, tokens: list[int]) -> RequestOutput:
        """Tokens that nobody sampled. The request is behind by them, and catches up as anybody does."""
        taken, reason, stop_token_id = append(request, tokens, self._eos_token_ids)
        self._counters.num_generation_tokens += len(taken)
        self._counters.num_jump_forward_tokens += len(taken)
        if reason is not None:
            self._remove(request, reason)
        return news(request, taken, None, reason, stop_token_id, None)

    # --- one step -------------------------------------------------------------------------------------

    def _secure_pages(self, counts: list[int]) -> bool:
        """Give every running request the pages for its tokens, at the cost of the last ones if need be.

        False when that cost cannot be paid yet, because a step in flight still writes to those pages.
        """
        i = 0
        while i < len(counts):
            request = self._running[i]
            while not self._kv.extend(request.table, request.num_computed_tokens + counts[i]):
                if self._in_flight:
                    return False
                counts.pop()
                self._preempt_last()
                if len(counts) == i:  # the request was the last one itself
                    return True
            i += 1
        return True

    def _preempt_last(self) -> None:
        victim = self._running.pop()
        self._kv.free(victim.table)
        self._free_slot(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        insort(self._waiting, victim, key=_rank)
        self._counters.num_preemptions += 1

    def _burst_length(self, counts: list[int]) -> int:
        """Decode steps to do in one call: more than one only while nobody waits and all rows decode.

        Every row gets pages and room in its length for all of them.
        """
        if self._waiting or self._constrained or not self._burst.is_on or max(counts) > 1:
            return 1
        rows = [request for request, count in zip(self._running, counts, strict=True) if count]
        bucket = self._buckets.pick("decode", len(rows))
        num_steps = self._burst.num_steps_of(rows, bucket, len(self._in_flight))
        needs = [(request.table, request.num_computed_tokens + num_steps) for request in rows]
        return num_steps if num_steps == 1 or self._kv.extend_all(needs) else 1

    def _start_waiting(self, counts: list[int]) -> list[Request]:
        """Let waiting requests in, and say whom. The cache is asked now, not at arrival: it may have learnt since."""
        newcomers: list[Request] = []
        budget = self._max_tokens - sum(counts)
        while self._waiting and budget > 0 and len(counts) < self._max_rows:
            request = self._waiting[0]
            if not request.is_ready:  # it was preempted a moment ago
                break
            # A spare page for each running request: else the newcomer, the last in rank, would soon give its
            # pages back, and a request just preempted would take its own back from those who needed them.
            num_cached = self._kv.start(
                request.table, request.tokens, num_spare_blocks=len(counts), may_share=not request.num_unscored
            )
            if num_cached is None:
                break
            del self._waiting[0]
            newcomers.append(request)
            self._constrained.start(request)
            request.num_computed_tokens = num_cached
            request.slot = self._free_slots.pop()
            if request.queue_seconds is None:
                request.queue_seconds = self._clock() - request.arrival_s
                request.num_cached_tokens = num_cached
                self._counters.count_prefix(request.num_prompt_tokens, num_cached)
            count = min(request.num_tokens - num_cached, budget)
            budget -= count
            place = bisect(self._running, request.rank, key=_rank)
            self._running.insert(place, request)
            counts.insert(place, count)
        return newcomers

    # --- after a step ---------------------------------------------------------------------------------

    def _land(self, plan: StepPlan) -> list[Request]:
        """The requests of the oldest step in flight, which is over. Pages of those that ended meanwhile may be free."""
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise RuntimeError("this plan is not the oldest step in flight")
        _, requests = self._in_flight.popleft()
        for request in requests:
            request.num_in_flight -= 1
            if request.finish_reason is not None and not request.num_in_flight:
                self._kv.free(request.table)
        return requests

    def _accept(
        self,
        request: Request,
        tokens: list[int],
        result: StepResult,
        rows: slice,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> RequestOutput:
        """New tokens of `request`, up to and with the one that ends it."""
        if request.num_tokens == request.num_prompt_tokens:
            self._counters.num_prompt_tokens += request.num_prompt_tokens
        taken, reason, stop_token_id = append(request, tokens, self._eos_token_ids)
        self._counters.num_generation_tokens += len(taken)
        if self._kv.may_publish(request.table, request.num_tokens - 1):  # the newest token has no KV yet
            self._kv.publish(request.table, request.tokens, request.num_tokens - 1)
        if reason is not None:
            self._remove(request, reason)
        elif request.grammar is not None:
            request.grammar.advance(taken[-1])
        logprobs = logprobs_of(request, result, rows, len(taken))
        return news(request, taken, logprobs, reason, stop_token_id, prompt_logprobs)

    def _end(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> RequestOutput:
        """End `request` without a token."""
        self._remove(request, reason)
        return ending(request, reason, error)

    def _remove(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.request_id]
        if not self._constrained.remove(request):
            line = self._waiting if request.slot is None else self._running
            del line[bisect_left(line, request.rank, key=_rank)]  # ranks are unique
        if request.slot is not None:
            self._free_slot(request)
        if not request.num_in_flight:
            self._kv.free(request.table)

    def _free_slot(self, request: Request) -> None:
        if request.slot is None:
            raise RuntimeError(f"{request.request_id} holds no slot")
        self._free_slots.append(request.slot)
        request.slot = None
