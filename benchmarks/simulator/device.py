"""A device of table-driven speed on a virtual clock: it takes the plans of a real engine and computes nothing.

The token ids of its results are all the same: routing, scheduling and caching depend on them only through the hashes of
pages, which cover the whole prefix, and prompts differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.step_times import StepTable
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult
from jaxserve.types import ProgramKind

REPLY_TOKEN = 256
VOCAB_SIZE = 257
_NO_TOP = np.zeros((1, 1), np.int32)


class VirtualClock:
    """The time of one replica, which moves when something happens."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


@dataclass(frozen=True, slots=True)
class VirtualPending:
    """A submitted step. To await its result moves the clock to its end."""

    clock: VirtualClock
    finish_s: float
    plan: StepPlan
    device_seconds: float

    def is_done(self) -> bool:
        return self.clock.now_s >= self.finish_s

    def next_tokens(self) -> None:
        """They come with the result."""

    def result(self) -> StepResult:
        self.clock.advance_to(self.finish_s)
        num_rows = len(self.plan.request_ids)
        tokens = np.full((self.plan.num_steps, num_rows), REPLY_TOKEN, np.int32)
        return StepResult(tokens, tokens, _NO_TOP, _NO_TOP, self.device_seconds)


class VirtualDevice:
    """An Executor that runs steps one after the other, each as long as the table says."""

    def __init__(self, table: StepTable, clock: VirtualClock) -> None:
        engine = table.engine
        self.table = table
        self.buckets: Buckets = engine.buckets
        self.eos_token_ids: frozenset[int] = frozenset()
        self.weights = None
        self.pages = self.snapshots = None
        self.free_at_s = 0.0
        """When all submitted steps are done."""
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_calls = 0
        self.last_kind: ProgramKind | None = None
        """The kind of the step that was submitted last."""
        self._clock = clock
        self.model_info = ModelInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=engine.max_model_len,
            num_kv_blocks=engine.num_kv_blocks,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            kv_dtype="none",
            platform="simulated",
            num_devices=1,
            fingerprint="00000000",
        )

    @property
    def next_start_s(self) -> float:
        """When a step that is submitted now would start."""
        return max(self.free_at_s, self._clock.now_s)

    def submit(self, plan: StepPlan) -> VirtualPending:
        seconds = self.table.seconds(plan)
        self.free_at_s = self.next_start_s + seconds
        self.busy_s += seconds
        self.num_steps += plan.num_steps
        self.num_calls += 1
        self.last_kind = plan.kind
        return VirtualPending(self._clock, self.free_at_s, plan, seconds)

    def add_stats(self, stats: EngineStats) -> None:
        """Nothing is compiled, and there is one host."""

    def profile(self, is_on: bool) -> None:
        """There is no other host to profile."""

    def close(self) -> None:
        """There is nothing to release."""
