"""Speculative decoding with a draft model: which steps are speculative, and how many drafted tokens they verify.

A speculative step verifies the tokens that the one before it drafted, and drafts the next ones; all of it happens on the
device (`runner.speculation`), so the next speculative step can be dispatched before the last one is read. Any other step
waits for it, since positions are exact only then. Steps with prompts are not speculative, nor are those of more than half
of the rows.

Speculation is on while it pays: while it yields more tokens per second than decode steps, by measured step times and
accepted tokens. One decode step now and then measures the time of decode steps; speculation that did not pay is tried again
after a while, later each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import numpy as np

from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.plan import UNREAD_TOKEN, Buckets, StepPlan, StepResult
from jaxserve.scheduler.request import Request

MAX_MISSING: Final = 8
"""Tokens that decode steps computed and the draft model did not see, after which a request gets no drafts."""
NUM_TRIALS: Final = 8
"""Speculative steps before their yield is judged."""
_MEMORY: Final = 0.9
"""Weight of a known average against its newest value."""
_DECODE_EVERY: Final = 256
"""Speculative steps after which a decode step is done, to measure its time again."""
_RETRY_AFTER: Final = (64, 4096)
"""Decode steps before speculation that did not pay is tried again: at first, and at most."""

Choice = Literal["speculate", "measure", "decode"]
"""A step: speculative, one decode step to learn its time, or as many decode steps as fit."""


class Payoff:
    """Measures whether speculative steps yield more tokens per second than decode steps."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._seconds: dict[tuple[str, int], float] = {}
        """Average time of a step by kind and bucket."""
        self._num_tokens = 1.0
        """Average accepted tokens per row of a speculative step."""
        self._num_trials = self._num_speculative = self._num_decodes = 0
        """Speculative steps of this trial; speculative steps since a decode step; decode steps since speculation ended."""
        self._retry_after = _RETRY_AFTER[0]
        self.pays = True
        """False if the next step would be a decode step because those are faster, by all that was observed."""

    def choose(self, num_rows: int) -> Choice:
        """Return what the next step of so many decoding rows should be."""
        if self._num_trials < NUM_TRIALS:
            return "speculate"
        decode = self._seconds.get(("decode", self._buckets.pick("decode", num_rows)))
        if decode is None or self._num_speculative >= _DECODE_EVERY:
            return "measure"
        speculative = self._seconds.get(("speculate", self._buckets.pick("speculate", num_rows)), 0.0)
        return "speculate" if self._num_tokens * decode >= speculative else "decode"

    def observe(self, plan: StepPlan, result: StepResult, num_tokens: int) -> None:
        """Learn from a step that yielded so many tokens in all."""
        key, seconds = (plan.kind, plan.bucket), result.device_seconds / result.num_steps
        if plan.kind == "decode":
            self._num_decodes += result.num_steps
            self._num_speculative = 0
            if self._num_decodes >= self._retry_after:
                self._num_trials = self._num_decodes = 0
                self._retry_after = min(2 * self._retry_after, _RETRY_AFTER[1])
        elif plan.kind == "speculate":
            yielded = num_tokens / len(plan.request_ids)
            self._num_tokens = yielded if not self._num_trials else _averaged(self._num_tokens, yielded)
            self._num_trials += 1
            self._num_speculative += 1
            self._num_decodes = 0
            if self._num_trials > 4 * NUM_TRIALS:
                self._retry_after = _RETRY_AFTER[0]
        else:
            return
        self._seconds[key] = _averaged(self._seconds.get(key, seconds), seconds)
        if len(plan.request_ids) <= self._buckets.max_speculative_rows:
            self.pays = self.choose(len(plan.request_ids)) != "decode"


def _averaged(known: float, newest: float) -> float:
    return _MEMORY * known + (1 - _MEMORY) * newest


class Speculation:
    """The policy of an engine with a draft model."""

    def __init__(self, buckets: Buckets, kv: KVManager, *, is_on: bool) -> None:
        """is_on: False without a draft model; then no step is speculative."""
        self._is_on = is_on
        self._buckets = buckets
        self._kv = kv
        self._payoff = Payoff(buckets)

    @property
    def pays(self) -> bool:
        """True unless the last steps have shown that speculation yields fewer tokens per second, or there is no draft model."""
        return self._is_on and self._payoff.pays

    def is_next(self, running: Sequence[Request]) -> bool:
        """Return True if the next step is speculative, if no request starts with it."""
        return self._choice(running) == "speculate"

    def is_measuring(self, running: Sequence[Request]) -> bool:
        """Return True if the next step is to be one decode step, whose time is of interest."""
        return self._choice(running) == "measure"

    def draft_lengths(self, running: Sequence[Request], counts: Sequence[int]) -> list[int] | None:
        """Return the drafted tokens to verify for each request with a row; None if the step is not speculative.

        Pages are allocated for them and, as far as there are any, for the tokens that are drafted next.
        """
        if max(counts) > 1 or not self.is_next(running):
            return None
        return [self._length(request) for request, count in zip(running, counts, strict=True) if count]

    def begin(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Note which draft each request has when the step, which is submitted, is done."""
        if self._is_on:
            for request in requests:
                request.draft.begin_step(plan.kind, plan.num_steps)

    def learn(self, plan: StepPlan, requests: Sequence[Request], result: StepResult, stats: EngineStats) -> None:
        """Learn from a step that has been read, before its tokens are appended."""
        if not self._is_on:
            return
        num_valid = (result.token_ids != UNREAD_TOKEN).sum(0).tolist()
        if plan.draft_lengths is not None:
            for request, planned, valid in zip(requests, plan.draft_lengths.tolist(), num_valid, strict=True):
                num_drafted = min(planned, request.length_limit - request.num_tokens - 1)
                if num_drafted > 0 and valid and request.finish_reason is None:
                    request.draft.learn(valid - 1)
                    count_draft(request, num_drafted, valid - 1, stats)
        self._payoff.observe(plan, result, sum(num_valid))

    def _choice(self, running: Sequence[Request]) -> Choice:
        """Return what the next step should be if no request starts with it."""
        is_small = self._is_on and 0 < len(running) <= self._buckets.max_speculative_rows
        if not is_small or not any(map(_may_draft, running)):
            return "decode"
        return self._payoff.choose(len(running)) if all(map(is_decoding, running)) else "decode"

    def _length(self, request: Request) -> int:
        """Return the drafted tokens to verify for a request."""
        if not _may_draft(request):
            return 0
        num_drafts = self._buckets.num_drafts
        # A draft that follows one that was all right ends there.
        last = request.num_computed_tokens + 2 + 2 * num_drafts
        has_pages = self._kv.extend(request.table, min(last, request.length_limit))
        return min(request.draft.max_tokens, num_drafts) if has_pages and request.draft.is_waiting else 0


def is_speculating(in_flight: Sequence[tuple[StepPlan, list[Request]]]) -> bool:
    """Return True if the newest step in flight is speculative: only another one may be dispatched before it is read."""
    return bool(in_flight) and in_flight[-1][0].kind == "speculate"


def _may_draft(request: Request) -> bool:
    """Return True if a request can have drafts: without grammar, sampler state and alternatives of tokens."""
    draft = request.draft
    return draft.max_tokens > 0 and draft.num_missing <= MAX_MISSING and not request.sampling.num_top_logprobs


def is_decoding(request: Request) -> bool:
    """Return True if one token of the request is missing, which is text, and no log-probability of its prompt."""
    length, first = request.num_tokens + request.num_unread_tokens, request.num_computed_tokens
    if first + 1 != length or request.num_unscored:
        return False
    return request.images is None or not request.images.overlapping(first, length)


def count_draft(request: Request, num_drafted: int, num_accepted: int, stats: EngineStats) -> None:
    """Count a draft that was verified."""
    request.draft.count(num_accepted, num_drafted - num_accepted)
    stats.spec_decode_num_drafts += 1
    stats.spec_decode_num_draft_tokens += num_drafted
    stats.spec_decode_num_accepted_tokens += num_accepted


def speculative(plan: StepPlan, requests: Sequence[Request], lengths: Sequence[int], buckets: Buckets) -> StepPlan:
    """Return a plan of decode rows as a speculative step. lengths: of each row's draft, which waits in its slot."""
    return replace(
        plan,
        kind="speculate",
        bucket=buckets.pick("speculate", len(lengths)),
        num_steps=1 + buckets.num_drafts,
        draft_lengths=np.array(lengths, np.int32),
        # Two decode steps in flight leave unread tokens as well, but exact positions.
        is_position_unread=np.array(
            [request.draft.is_waiting and request.num_unread_tokens > 0 for request in requests]
        ),
        num_ahead=1 + buckets.num_drafts,
    )
