"""Skips ahead: many decode steps of an unchanged batch become one call of the real scheduler.

Exact are the lengths of all steps and calls, and the times at which requests start and end. Between calls that are
merged nothing may happen: no request arrives, ends, waits, or lacks pages. Pages that the merged steps need are taken
at once instead of one by one; in between no request could have taken or found them.

Two kinds of engines are skipped through:

    calls of several steps    (TPUs, CPUs) Every call is planned when the one before it has been read. The lengths of the
                              merged calls follow from the real policy, and from the step times that it would observe.
    single steps, overlapped  (GPUs) The next step is planned while one runs. Merged steps end before the horizon, and
                              one step before the first request ends, so that the step after that one is planned while
                              it runs, as without skipping.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.simulator.device import VirtualDevice
from benchmarks.simulator.step_times import ProgramTimes, decode_seconds
from jaxserve.kv.manager import KVManager
from jaxserve.scheduler.multi_step import MultiStepPolicy
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.scheduler.request import Request


class SkipAhead(MultiStepPolicy):
    """The real policy, with calls merged up to `horizon_s`."""

    def __init__(self, device: VirtualDevice, max_seconds: float, kv: KVManager) -> None:
        """max_seconds: of one call that is not merged."""
        super().__init__(device.buckets, max_seconds, kv)
        self.horizon_s = 0.0
        """The time before which no request arrives."""
        self._device = device
        self._is_learned = False
        """True if the times of the call in flight were counted when it was planned."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        if self._is_learned and plan.num_steps > 1:
            self._is_learned = False
        else:
            super().observe(plan, result)

    def num_steps(self, running: Sequence[Request], counts: Sequence[int], num_in_flight: int) -> int:
        first = super().num_steps(running, counts, num_in_flight)
        if not self._may_merge(running, counts, first, num_in_flight):
            return first
        bucket = self._buckets.pick("decode", len(running))
        times = self._device.table.programs[f"decode/{bucket}"]
        num_keys = sum(request.num_computed_tokens for request in running) + len(running)
        num_left = min(request.length_limit - request.num_tokens - request.num_unread_tokens for request in running)
        known = self._step_seconds.get(bucket)
        if self._is_on:
            total = self._merged_calls(bucket, times, len(running), num_keys, first, num_left)
        else:
            total = self._merged_steps(times, len(running), num_keys, num_left)
        needs = [(request.table, request.num_computed_tokens + total) for request in running]
        if total > first and self._kv.extend_all(needs):
            self._is_learned = self._is_on
            return total
        if known is not None:
            self._step_seconds[bucket] = known
        return first

    def _may_merge(self, running: Sequence[Request], counts: Sequence[int], first: int, num_in_flight: int) -> bool:
        """Return True if this is a step of decodes only, and the calls after it depend on nothing that is in flight."""
        if min(counts) != 1 or max(counts) != 1:
            return False
        if self._is_on and (first == 1 or (num_in_flight and self._device.last_kind == "decode")):
            return False
        return all(
            request.num_computed_tokens + 1 == request.num_tokens + request.num_unread_tokens for request in running
        )

    def _merged_calls(
        self, bucket: int, times: ProgramTimes, num_rows: int, num_keys: int, first: int, num_left: int
    ) -> int:
        """Return the steps of all calls that begin before the horizon; their times are counted as observed."""
        total, count = 0, first
        start_s = self._device.next_start_s
        while count > 1:
            seconds = decode_seconds(times, num_rows, num_keys + total * num_rows, count)
            self._learn(bucket, seconds / count)
            total += count
            start_s += seconds
            if start_s >= self.horizon_s:
                break
            count = min(self._num_fitting(bucket, 0), num_left - total)
        return total

    def _merged_steps(self, times: ProgramTimes, num_rows: int, num_keys: int, num_left: int) -> int:
        """Return the single steps that end before the horizon and before the last step of any request."""
        least, most = 1, num_left - 1
        start_s = self._device.next_start_s
        while least < most:  # a bisection: ends grow with the number of steps
            middle = (least + most + 1) // 2
            if start_s + decode_seconds(times, num_rows, num_keys, middle) < self.horizon_s:
                least = middle
            else:
                most = middle - 1
        return least
