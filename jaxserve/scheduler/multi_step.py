"""Multi-step decode: how many decode steps one call may do.

Several steps in one call need no plan, no message and no chunk per token. A request that arrives meanwhile cannot join
before the call is over; so a call lasts no longer than a given time, judged by earlier steps of the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult
from jaxserve.scheduler.request import Request

_MEMORY: Final = 0.75
"""Weight of the known step time of a program against its newest step."""


class MultiStepPolicy:
    """Step times by decode bucket, and the number of steps that follows from them."""

    def __init__(self, buckets: Buckets, max_seconds: float, kv: KVManager) -> None:
        """max_seconds: of one call; 0 allows single steps only."""
        self._is_on = buckets.max_decode_steps > 1 and max_seconds > 0
        self._buckets = buckets
        self._max_seconds = max_seconds
        self._kv = kv
        self._step_seconds: dict[int, float] = {}

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        if plan.kind == "decode":
            self._learn(plan.bucket, result.device_seconds / result.num_steps)

    def num_steps(self, running: Sequence[Request], counts: Sequence[int], num_in_flight: int) -> int:
        """Return the decode steps to do in one call, after `num_in_flight` submitted ones; at least 1.

        More than one only if all rows decode, without alternatives of tokens, and get pages for all steps.
        """
        if not self._is_on or max(counts) > 1:
            return 1
        rows = [request for request, count in zip(running, counts, strict=True) if count]
        num_steps = self._num_fitting(self._buckets.pick("decode", len(rows)), num_in_flight)
        for request in rows:
            length = request.num_tokens + request.num_unread_tokens
            if request.images is not None and request.num_computed_tokens < request.num_prompt_tokens:
                return 1
            if request.num_computed_tokens + 1 < length or request.sampling.num_top_logprobs or request.num_unscored:
                return 1
            num_steps = min(num_steps, request.length_limit - length)
        needs = [(request.table, request.num_computed_tokens + num_steps) for request in rows]
        return num_steps if num_steps == 1 or self._kv.extend_all(needs) else 1

    def _learn(self, bucket: int, seconds: float) -> None:
        """Count one call whose steps took `seconds` each."""
        known = self._step_seconds.get(bucket, seconds)
        self._step_seconds[bucket] = _MEMORY * known + (1 - _MEMORY) * seconds

    def _num_fitting(self, bucket: int, num_in_flight: int) -> int:
        seconds = self._step_seconds.get(bucket)
        if seconds is None:
            return 1
        num_fitting = self._max_seconds / seconds if seconds > 0 else self._buckets.max_decode_steps
        return max(1, int(min(num_fitting - num_in_flight, self._buckets.max_decode_steps)))
