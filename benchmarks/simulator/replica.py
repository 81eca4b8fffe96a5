"""One simulated replica: the real engine core and scheduler on a virtual device, and the real loop's listening.

A turn is what `engine.loop.EngineLoop.turn` does: listen for messages until the next step is due, then run a step. Its
time is known before it happens, so a replica sleeps between turns. It also sleeps through turns that cannot end or begin
a request: their time is made up for when a request arrives, when the first request may end, or after `progress_s`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.device import VirtualClock, VirtualDevice
from benchmarks.simulator.skip_ahead import SkipAhead
from benchmarks.simulator.step_times import StepTable, decode_seconds
from jaxserve.config import SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.kv.block_table import BlockTable, HashChain
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_changes import PageChanges
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import BlockHash


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a replica tells at one time."""

    time_s: float
    outputs: list[RequestOutput]
    published: list[BlockHash]
    """Pages that the prefix cache has gained."""
    evicted: list[BlockHash]
    """Pages that it has lost."""


class SharingKV(KVManager):
    """The real pages, with hashes that were computed once for router, engines and all turns of a conversation."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, changes: PageChanges | None) -> None:
        super().__init__(num_blocks, block_size, max_model_len, changes=changes)
        self.chain: HashChain | None = None
        """The hashes of the request that is added next; None to compute them."""

    def new_table(
        self, cache_salt: str | None, adapter: int = 0, images: Sequence[tuple[int, int, bytes]] = ()
    ) -> BlockTable:
        if self.chain is None:
            return super().new_table(cache_salt, adapter, images)
        return BlockTable(self.max_blocks, self.chain)


class SkippingScheduler(Scheduler):
    """The real scheduler, with calls merged by `SkipAhead`."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, device: VirtualDevice, clock: VirtualClock) -> None:
        info = device.model_info
        super().__init__(config, kv, device.buckets, info.max_model_len, device.eos_token_ids, info.vocab_size, clock)
        self.skip_ahead = SkipAhead(device, config.max_burst_ms / 1000, kv)
        self._multi_step = self.skip_ahead


class SimulatedReplica:
    """An engine in virtual time. `wake` and `submit` are called with times that never decrease."""

    def __init__(
        self, table: StepTable, config: SchedulerConfig, *, skips: bool, progress_s: float, publishes_pages: bool
    ) -> None:
        """progress_s: the longest sleep while requests run, after which their new tokens are reported.

        skips: False to run every turn at its time.
        """
        self._clock = VirtualClock()
        self.device = VirtualDevice(table, self._clock)
        info = self.device.model_info
        changes = PageChanges() if publishes_pages else None
        self.kv = SharingKV(info.num_kv_blocks, info.block_size, info.max_model_len, changes)
        self._skip_ahead: SkipAhead | None = None
        self.scheduler: Scheduler
        if skips:
            scheduler = SkippingScheduler(config, self.kv, self.device, self._clock)
            self._skip_ahead = scheduler.skip_ahead
            self.scheduler = scheduler
        else:
            self.scheduler = Scheduler(
                config,
                self.kv,
                self.device.buckets,
                info.max_model_len,
                self.device.eos_token_ids,
                info.vocab_size,
                self._clock,
            )
        self._core = EngineCore(
            self.scheduler, self.device, depth=int(config.overlap), page_changes=changes, clock=self._clock
        )
        self._progress_s = progress_s
        self._inbox: deque[tuple[float, AddRequest, HashChain | None]] = deque()
        self._reports: list[Report] = []
        self._turn_wake_s = math.inf
        self.next_wake_s = math.inf
        """When something may happen next; infinite while it is idle."""
        self.num_preemptions = 0

    def submit(self, time_s: float, message: AddRequest, chain: HashChain | None = None) -> None:
        """Take a request that arrives at `time_s`. chain: hashes of its pages, if they are shared."""
        self._run_until(time_s, may_start_at=False)
        self._inbox.append((time_s, message, chain))
        self._plan_wake()

    def wake(self, time_s: float) -> list[Report]:
        """Run all turns up to `time_s`; returns the reports that are due."""
        if time_s >= self._turn_wake_s:
            self._run_until(time_s, may_start_at=True)
        due = [report for report in self._reports if report.time_s <= time_s]
        self._reports = self._reports[len(due) :]
        self._plan_wake()
        return due

    def _next_turn_s(self) -> float:
        """Return the time of the next turn; infinite if there is nothing to do."""
        if self._core.has_work:
            return self._clock.now_s + self._core.patience_s()
        return max(self._clock.now_s, self._inbox[0][0]) if self._inbox else math.inf

    def _run_until(self, time_s: float, *, may_start_at: bool) -> None:
        """Run the turns before `time_s`, and at it if `may_start_at`."""
        if self._skip_ahead is not None:
            self._skip_ahead.horizon_s = time_s
        while (turn_s := self._next_turn_s()) < time_s or (may_start_at and turn_s == time_s):
            self._clock.advance_to(turn_s)
            outputs: list[RequestOutput] = []
            while self._inbox and self._inbox[0][0] <= turn_s:
                _, message, self.kv.chain = self._inbox.popleft()
                outputs += self._core.handle(message)
            if self._core.has_work:
                step = self._core.step()
                if step is not None:
                    outputs += step.outputs
                    if step.stats is not None:
                        self.num_preemptions += step.stats.num_preemptions
            changes = self._core.page_changes
            published, evicted = ([], []) if changes is None else changes.take()
            if outputs or published or evicted:
                self._reports.append(Report(self._clock.now_s, outputs, published, evicted))

    def _plan_wake(self) -> None:
        self._turn_wake_s = self._next_turn_s()
        if self._skip_ahead is not None and not self._inbox:
            self._turn_wake_s = max(self._turn_wake_s, self._quiet_until_s())
        self.next_wake_s = min(self._turn_wake_s, self._reports[0].time_s if self._reports else math.inf)

    def _quiet_until_s(self) -> float:
        """Return a time until which no request can begin or end if none arrives, and at most `progress_s` from now."""
        running = self.scheduler.running
        if self.scheduler.waiting or not running:
            return 0.0
        num_left, num_keys = 1 << 30, 0
        for request in running:
            if request.num_tokens == request.num_prompt_tokens:
                return 0.0
            num_left = min(num_left, request.length_limit - request.num_tokens - request.num_unread_tokens)
            num_keys += request.num_computed_tokens
        bucket = self.device.buckets.pick("decode", len(running))
        step_s = decode_seconds(self.device.table.programs[f"decode/{bucket}"], len(running), num_keys, 1)
        return min(self._clock.now_s + self._progress_s, self.device.next_start_s + num_left * step_s)
