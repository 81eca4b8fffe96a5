"""Decides what the next step computes.

There are no phases of a request. It knows `num_tokens` tokens and has computed `num_computed_tokens` of them; every step
spends a budget of tokens on letting requests catch up, and a request that has caught up gets one new token. Chunked
prefill, prefix-cache hits and preemption are this one rule:

    decoding            one token missing, catches up every step
    chunked prefill     many missing, catches up by what the budget leaves
    prefix-cache hit    starts with `num_computed_tokens` > 0
    preemption          `num_computed_tokens` back to 0, tokens kept: the same text continues later

The order of rank is priority, lowest first, then arrival. Running and waiting requests are two lists in that order.
`schedule` has these phases:

    1. secure pages, in order: if the pool is empty, the last running request is preempted;
    2. share the budget: every running request gets one token; the policy (`budget`) gives the rest to those that miss
       more, and to waiting requests, which it starts while rows and pages last (none after a preemption). One whose
       prefix is fetched from a tier (`prefetch`) leaves the queue until the fetch has ended;
    3. let the policies add to a step of single tokens: drafts (`drafting`), or further decode steps (`multi_step`);
    4. pack the rows into a program.

No request starves: rows never exceed the budget, so every running request moves every step; the first in rank is never
preempted; at most `max_rows` requests start before one whose turn it is; and a request that can never fit is rejected on
arrival.

All calls depend on state and arguments only, without randomness and I/O; the clock is read for reported times only. Of
time, only the step times in results decide anything: how many decode steps one call may do. The exceptions are
`poll_grammars`, which asks the threads that make masks and waits for them a few milliseconds, and the fetches of
`prefetch`, which `schedule` asks in the same way.

Steps in flight. `schedule` may be called before the last plan is updated. A request that samples in a step in flight has
a token that only the device knows: it counts towards its length (`num_unread_tokens`) and the next plan has UNREAD_TOKEN
for it. That costs at most one row of one step: a request that ended by a token is computed once more, and the result is
dropped. Preemption waits until no step is in flight, and every plan waits for a call of several decode steps, which may
end early. While a request with a grammar has an unread token no step is dispatched, since its mask depends on that token;
the same holds for requests that could have a draft.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable

import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.messages import AddRequest, ErrorInfo, RequestOutput, TokenLogprobs
from jaxserve.ipc.prompt_embeds import PromptEmbedsInfo
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.manager import KVManager, name_weights
from jaxserve.kv.routed_experts import PageExperts
from jaxserve.kv.tiers.tiers import KVTiers
from jaxserve.scheduler.admission import Admission
from jaxserve.scheduler.base import BaseScheduler
from jaxserve.scheduler.budget import PrefillBudget, ShortestFirst
from jaxserve.scheduler.constrained import ConstrainedDecoding, Grammars
from jaxserve.scheduler.drafting import Drafter, by_request, confirmed, num_drafted, with_chunks, with_drafts
from jaxserve.scheduler.fair_keys import FairKeys, Rank, by_rank
from jaxserve.scheduler.images.policy import ImagePolicy
from jaxserve.scheduler.images.request_images import images_of
from jaxserve.scheduler.isolation import Isolation
from jaxserve.scheduler.limits import StepLimits
from jaxserve.scheduler.multi_step import MultiStepPolicy
from jaxserve.scheduler.packing import cut_chunk, pack, token_places
from jaxserve.scheduler.plan import UNREAD_TOKEN, Buckets, EmbedsItem, EncodeItem, StepPlan, StepResult, StepTokens
from jaxserve.scheduler.prefetch import Prefetch
from jaxserve.scheduler.request import Request, logprobs_of, output_of, prompt_logprobs_of, routed_experts_of
from jaxserve.scheduler.resources import Resources
from jaxserve.scheduler.speculation import Speculation, is_speculating, speculative
from jaxserve.types import FinishReason


class Scheduler(BaseScheduler[Request, StepPlan, StepResult]):
    """The requests of one engine that generates tokens."""

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
        tiers: KVTiers | None = None,
        images: ImageInfo | None = None,
        prompt_embeds: PromptEmbedsInfo | None = None,
        routed_experts: RoutedExpertsInfo | None = None,
    ) -> None:
        """Limits are those of the buckets, or the config's if it has smaller ones.

        grammars: None rejects requests that have a grammar. tiers: stores from which evicted pages come back.
        images: those that the model reads; None rejects requests that have some. prompt_embeds: the same for embeddings.
        routed_experts: set if every result has the experts of its tokens; None rejects requests that want them.
        """
        self._kv = kv
        self._buckets = buckets
        self._eos_token_ids = eos_token_ids
        max_tokens = min(max(buckets.mixed), config.max_num_batched_tokens or max(buckets.mixed))
        largest = min(buckets.max_num_seqs, max(buckets.decode), max_tokens)
        self._limits = StepLimits(max_tokens, min(largest, config.max_num_seqs or largest))
        admission = Admission(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            num_usable_tokens=kv.num_usable_tokens,
            max_requests=self._limits.max_rows + config.max_queued_requests,
            has_grammars=grammars is not None,
            has_priorities=config.has_priorities,
            images=images,
            prompt_embeds=prompt_embeds,
            returns_routed_experts=routed_experts is not None,
        )
        is_fair = config.scheduling_policy == "fair"
        super().__init__(admission, clock, FairKeys() if is_fair else None)
        self._max_output_tokens = admission.max_output_tokens
        self._image_info = images
        has_rows = images is not None or prompt_embeds is not None
        self._images = ImagePolicy(images, prompt_embeds, max_tokens) if has_rows else None
        self._experts = None if routed_experts is None else PageExperts(kv, routed_experts.shape, routed_experts.dtype)
        self._resources = Resources(kv, buckets.max_num_seqs, self._images)
        self._constrained = ConstrainedDecoding(grammars)
        self._shortest_first = ShortestFirst(kv) if is_fair else None
        self._budget = PrefillBudget(
            self._limits, self._resources, self._constrained, clock, self._shortest_first, self._fair_keys
        )
        has_model = buckets.num_drafts > 0 and not buckets.plans_have_drafts
        self._drafter = Drafter(config.num_speculative_tokens, self._limits, kv, buckets)
        self._speculation = Speculation(buckets, kv, is_on=has_model and config.num_speculative_tokens > 0)
        self._multi_step = MultiStepPolicy(buckets, config.max_burst_ms / 1000, kv)
        self._prefetch = Prefetch(kv, tiers)
        self._isolation = Isolation(self._enqueue, lambda request: request.num_tokens)
        self._lose = self._lose_device

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, weights_name: str | None = None) -> None:
        while reset_running_requests and self.running:
            victim = self.running.pop()
            self._resources.preempt(victim)
            self._enqueue(victim)
            self.stats.num_preemptions += 1
        self._kv.reset_prefix_cache()
        if weights_name is not None:
            name_weights(weights_name, self._kv, [request.table for request in self.requests.values()])
        elif not reset_running_requests:
            self._prefetch.clear_tiers()
        else:
            self._prefetch.leave_device()
        if reset_running_requests:  # other weights, or none for a while
            self._resources.forget_computed(self.requests.values())

    def poll_grammars(self) -> list[RequestOutput]:
        """Apply what grammars have done; returns jump-forward tokens and ends. Call it before `schedule`.

        It waits up to 20 ms for masks that the next step needs.
        """
        if not self._constrained or self._waits_for_results():
            return []
        events = self._constrained.poll(self.running, is_idle=not self.waiting)
        outputs = []
        for request in events.prepared:
            self.stats.grammar_seconds.append(self._clock() - request.arrival_s)
            self._enqueue(request)
        for request, tokens in events.jumped:
            taken = request.append(tokens)
            self.stats.generation_tokens += len(taken)
            self.stats.forced_tokens += len(taken)
            if request.finish_reason is not None:
                self._remove(request)
            outputs.append(output_of(request, taken))
        outputs += [self._end(request, "stop") for request in events.terminated if request.finish_reason is None]
        outputs += [self._end(request, "error", error) for request, error in events.failed]
        return outputs

    def schedule(self) -> StepPlan | None:
        if self._waits_for_results():
            return None
        self._isolation.advance()
        if self._fair_keys is not None:
            self._fair_keys.close_gaps(self.requests.values(), self.waiting)
        for request in self._prefetch.poll(is_idle=not (self.running or self.waiting or self.in_flight)):
            self._enqueue(request)
        if self.waiting and is_speculating(self.in_flight):  # they may start, and that step needs exact positions
            return None
        # 1. Secure pages.
        missing = self._budget.missing(self.running)
        num_running = len(missing)
        victims = self._resources.secure(self.running, missing, may_preempt=not self.in_flight)
        if victims is None:
            return None
        for victim in victims:
            self._enqueue(victim)
        self.stats.num_preemptions += len(victims)
        # 2. Share the budget; images and recurrent states cut chunks.
        may_start = self.starts_requests and len(missing) == num_running
        if may_start and len(self.running) < self._limits.max_rows:
            self._prefetch.begin(self.waiting, self._shortest_first, len(self.running))
        counts, started = self._budget.share(self.running, self.waiting, missing, may_start=may_start)
        items: list[EncodeItem | EmbedsItem] = []
        if self._images is not None:
            firsts = [request.num_computed_tokens for request in self.running]
            are_replies = [request.num_computed_tokens >= request.num_prompt_tokens for request in self.running]
            images = [request.images for request in self.running]
            counts, items = self._images.cut(images, firsts, counts, are_replies)
        if states := self._kv.groups.states:
            counts = [cut_chunk(states, request, count) for request, count in zip(self.running, counts, strict=True)]
        for request in started:
            self._prefetch.forget(request)
        _count_prefix_hits(started, self.stats)
        if not any(counts):
            return None
        # 3. Add drafts, or further decode steps.
        drafts = self._drafter.draft(self.running, counts)
        lengths = self._speculation.draft_lengths(self.running, counts)
        num_steps = 1
        is_single = bool(drafts or items) or lengths is not None or self._speculation.is_measuring(self.running)
        if not (is_single or self.waiting or self._constrained):
            num_steps = self._multi_step.num_steps(self.running, counts, len(self.in_flight))
        # 4. Pack the rows.
        plan, requests = pack(self.running, counts, self._buckets, num_steps, started, states, items)
        if plan.image_rows is not None:  # the last token of a prompt is one of an image
            drafts = {}
        if drafts and self._buckets.plans_have_drafts:
            plan = with_chunks(plan, requests, drafts, self._buckets)
        elif drafts:
            plan, requests = with_drafts(plan, requests, drafts, self._buckets)
        if lengths is not None:
            plan = speculative(plan, requests, lengths, self._buckets)
        self._speculation.begin(plan, requests)
        rows = zip(requests, plan.num_scheduled_tokens.tolist(), plan.is_sampling.tolist(), strict=True)
        for request, count, is_sampling in rows:
            request.begin_step(count, plan.num_steps, is_sampling=is_sampling)
        self.in_flight.append((plan, requests))
        return plan

    def update(self, plan: StepPlan, result: StepResult | StepTokens) -> list[RequestOutput]:
        """Take the result of the oldest step in flight: new tokens, full pages, finished requests; or only tokens of the next of its
        decode steps."""
        if isinstance(result, StepTokens):
            return [] if self._experts is not None else self._take_tokens(result.token_ids)
        outputs, num_landed = [], self.num_landed
        self._multi_step.observe(plan, result)
        self._drafter.observe(plan, result)
        requests = self._land(plan)
        self._speculation.learn(plan, requests, result, self.stats)
        if self._experts is not None:
            assert result.routed_experts is not None, "an engine that returns experts"
            places = token_places(plan, requests, len(result.routed_experts))
            self._experts.write(*places, result.routed_experts)
        is_sampling = plan.is_sampling.tolist()
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        tokens_by_row = result.token_ids.T.tolist()
        for request, row, num_rows in by_request(requests):
            if request.finish_reason is not None:
                continue
            scores = None
            if plan.targets is not None:
                scores = prompt_logprobs_of(request, plan, result, row)
                request.land_scores(len(scores or ()))
            if is_sampling[row]:
                landed = num_landed if request.is_plain else 0
                tokens = tokens_by_row[row][landed:]
                if num_rows > 1:
                    tokens = confirmed(plan, result, row, num_rows)
                if result.is_speculative:
                    tokens = tokens[:1] + [token for token in tokens[1:] if token != UNREAD_TOKEN]
                if num_guesses := num_drafted(plan, row, num_rows):
                    self._drafter.learn(request, num_guesses, len(tokens) - 1, self.stats)
                request.land(plan.num_steps * num_rows - landed, len(tokens))
                outputs.append(self._accept(request, tokens, scores, result, slice(row, row + num_rows)))
                continue
            self._kv.publish(request.table, request.tokens, ends[row])
            routed = routed_experts_of(request, self._experts, ends[row])
            if scores is not None or routed is not None:
                outputs.append(output_of(request, [], prompt_logprobs=scores, routed_experts=routed))
        return outputs

    def _take_tokens(self, token_ids: np.ndarray) -> list[RequestOutput]:
        """Take the tokens of the next decode step of the oldest plan, but for requests that want more than tokens."""
        self.num_landed += 1
        outputs = []
        for request, token in zip(self.in_flight[0][1], token_ids.tolist(), strict=False):  # then rows of padding
            if request.is_plain and request.finish_reason is None:
                request.land(1, 1)
                outputs.append(self._accept(request, [token]))
        return outputs

    def _lose_device(self, plan: StepPlan, may_shrink: bool) -> bool:
        for request in self.running:
            self._resources.preempt(request)
        if self._shortest_first is not None:
            for request in self.waiting:
                self._shortest_first.remove(request)
        self._kv.reset_prefix_cache()
        self._prefetch.lose_device()
        if self._images is not None:
            self._images.forget()
        return may_shrink and self._limits.shrink(self._buckets, plan)

    def take_stats(self) -> EngineStats:
        stats = super().take_stats()
        stats.kv_cache_usage_perc = self._kv.usage
        stats.kv_cache_evictions = self._kv.pool.num_evictions
        stats.spec_decode_is_on = int(self._speculation.pays or self._drafter.pays)
        self._prefetch.add_stats(stats)
        if self._images is not None:
            self._images.add_stats(stats)
        return stats

    def _queue(self, message: AddRequest, rank: Rank) -> Request:
        if not self.requests:
            self._limits.restore()
        images = images_of(message, self._image_info)
        request = Request(
            message,
            self._kv.new_table(message.cache_salt, message.adapter, () if images is None else images.spans),
            self._max_output_tokens(message),
            rank,
            self._clock(),
            self._eos_token_ids,
            self._constrained.new_grammar(message),
            self._drafter.new_state(message),
            images,
        )
        if request.grammar is None:
            self._enqueue(request)
        else:
            self._constrained.prepare(request)
        return request

    def _waits_for_results(self) -> bool:
        """Return True if no step may be dispatched before the oldest one in flight is updated."""
        if self._drafter.waits_for(self.running) or self._constrained.waits_for(self.running):
            return True
        if is_speculating(self.in_flight):
            return bool(self.waiting) or not self._speculation.is_next(self.running)
        return bool(self.in_flight) and self.in_flight[-1][0].num_steps > 1

    def _enqueue(self, request: Request) -> None:
        """Let a request wait for its start, or for the end of the search for one that fails."""
        if self._isolation.takes(request):
            return
        insort(self.waiting, request, key=by_rank)
        if self._shortest_first is not None:
            self._shortest_first.add(request)

    def _land(self, plan: StepPlan) -> list[Request]:
        requests = super()._land(plan)
        for request in requests:
            request.end_step()
            if request.finish_reason is not None:
                self._resources.release_pages(request)
        return requests

    def _accept(
        self,
        request: Request,
        tokens: list[int],
        prompt_logprobs: list[TokenLogprobs] | None = None,
        result: StepResult | None = None,
        rows: slice = slice(0),
    ) -> RequestOutput:
        """Append new tokens of `request`, up to and with the one that ends it. result: None if it wants no log-probabilities."""
        if request.num_tokens == request.num_prompt_tokens:
            self.stats.prompt_tokens += request.num_prompt_tokens
        taken = request.append(tokens)
        self.stats.generation_tokens += len(taken)
        if self._kv.may_publish(request.table, request.num_tokens - 1):  # the newest token has no KV yet
            self._kv.publish(request.table, request.tokens, request.num_tokens - 1)
        routed = routed_experts_of(request, self._experts, request.num_tokens - 1)
        if request.finish_reason is not None:
            self._remove(request)
        elif request.grammar is not None:
            self._constrained.advance(request, taken[-1])
        logprobs = None if result is None else logprobs_of(request, result, rows, len(taken))
        return output_of(request, taken, logprobs, prompt_logprobs, routed_experts=routed)

    def _end(self, request: Request, reason: FinishReason, error: ErrorInfo | None = None) -> RequestOutput:
        request.finish(reason)
        self._remove(request)
        return output_of(request, [], error=error)

    def _remove(self, request: Request) -> None:
        super()._remove(request)
        if self._shortest_first is not None:
            self._shortest_first.remove(request)
        if self._fair_keys is not None:
            self._fair_keys.end(request, request.num_tokens - request.num_prompt_tokens)
        self._constrained.remove(request)
        self._prefetch.forget(request)
        self._resources.finish(request)


def _count_prefix_hits(started: list[Request], stats: EngineStats) -> None:
    for request in started:
        if not request.num_preemptions:
            stats.prefix_cache_queries += request.num_prompt_tokens
            stats.prefix_cache_hits += request.num_cached_tokens
