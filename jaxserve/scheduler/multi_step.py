"""How many decode steps one call may do while nobody waits.

A burst takes the host out of the loop: no plan, no message and no chunk per token. Its price is paid by a
request that arrives meanwhile, which cannot join before it is over; so a burst lasts no longer than a
given time, judged by the decode steps of the same program before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.scheduler.request import Request

_MEMORY: Final = 0.75
"""Weight of what was known of a program's step time against its newest step."""


class MultiStepPolicy:
    """Step times by decode bucket, and what follows from them."""

    def __init__(self, max_steps: int, max_seconds: float) -> None:
        """`max_steps`: what the programs can do; `max_seconds`: 0 switches bursts off."""
        self.is_on = max_steps > 1 and max_seconds > 0
        self._max_steps = max_steps
        self._max_seconds = max_seconds
        self._step_seconds: dict[int, float] = {}

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that is over."""
        if plan.kind == "decode":
            seconds = result.device_seconds / result.num_steps
            known = self._step_seconds.get(plan.bucket, seconds)
            self._step_seconds[plan.bucket] = _MEMORY * known + (1 - _MEMORY) * seconds

    def num_steps_of(self, rows: Sequence[Request], bucket: int, num_ahead: int) -> int:
        """The same, and as many as all of these requests can go without the host."""
        num_steps = self.num_steps(bucket, num_ahead)
        for request in rows:
            length = request.num_tokens + request.num_unread_tokens
            if request.num_computed_tokens + 1 < length or request.sampling.num_top_logprobs or request.num_unscored:
                return 1
            num_steps = min(num_steps, request.length_limit - length)
        return num_steps

    def num_steps(self, bucket: int, num_ahead: int) -> int:
        """Steps of this decode program that fit the time, `num_ahead` submitted ones included; at least 1."""
        seconds = self._step_seconds.get(bucket)
        if seconds is None or not self.is_on:
            return 1
        num_fitting = self._max_seconds / seconds if seconds > 0 else self._max_steps
        return max(1, int(min(num_fitting - num_ahead, self._max_steps)))
