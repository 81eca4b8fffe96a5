"""An executor without a device, for every test that needs an engine but no real model.

Like a device it runs steps in their order and takes its time: a step is done `device_seconds` after the one before it or
after its submission. A step is computed when its result is asked for, by one of `models`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import Config
from jaxserve.errors import CheckpointError
from jaxserve.executor.fake.models import FakeModel, FakeTokens, FakeVectors
from jaxserve.ipc.engine_spec import FakeOptions
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.tiers.device import PageDevice
from jaxserve.runner.buckets import page_tokens, resolve_embed_limits, resolve_limits
from jaxserve.scheduler.plan import Buckets, StepResult

PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4 ... and `largest` itself."""
    return tuple(sorted({1 << i for i in range(largest.bit_length()) if 1 << i < largest} | {largest}))


class StepLostError(Exception):
    """A step before this one failed."""


@dataclass(slots=True)
class FakePending(Generic[PlanT, ResultT]):
    """A step that is computed when its result is asked for."""

    executor: FakeExecutor[PlanT, ResultT]
    plan: PlanT
    index: int
    started: float
    outcome: ResultT | Exception | None = None
    num_shown: int = 0

    def is_done(self) -> bool:
        return self.outcome is not None or self.executor.would_be_done(self)

    def next_tokens(self) -> np.ndarray | None:
        if not self.executor.shows_tokens:
            return None
        self._compute()
        if not isinstance(self.outcome, StepResult) or self.num_shown + 1 >= self.outcome.num_steps:
            return None
        self.num_shown += 1
        tokens: np.ndarray = self.outcome.token_ids[self.num_shown - 1]
        return tokens

    def result(self) -> ResultT:
        self._compute()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    def _compute(self) -> None:
        while self.outcome is None:
            self.executor.compute_next()


class FakeWeights:
    """Weights that do not change what the fake model computes."""

    def __init__(self) -> None:
        self.installed: list[str] = []
        """Names that were installed, in order; "none" for weights that were discarded."""
        self.has_changed_files = False
        """True if weights that are read again may be others."""
        self._new = ""

    def load(self, model: str) -> Callable[[], None]:
        """Take any name but that of a path that does not exist."""
        if model.startswith("/") and not Path(model).exists():
            raise CheckpointError(f"{model}: no such folder")
        self._new = model
        return lambda: self.installed.append(model)

    def load_tensors(self, file: str) -> Callable[[], None]:
        """Take any file that can be opened; its tensors' names are installed."""
        names = ",".join(sorted(open_safetensors(Path(file)).tensors))
        self._new = file
        return lambda: self.installed.append(names)

    def new_hash(self) -> str:
        """Return the name that was loaded last: two fake models of one name are alike."""
        return self._new

    def start_hash(self) -> str:
        """Return the name of the weights of the start."""
        return "start"

    def load_adapter(self, place: int, name: str, source: str) -> Callable[[], None]:
        """Take any source but a path that does not exist."""
        return self.load(source)

    def keep_adapters(self, places: Set[int]) -> None:
        """The fake model has none."""

    def discard(self, *, keeps_copy: bool) -> Callable[[], None]:
        return lambda: self.installed.append("none")

    def restore(self) -> Callable[[], bool]:
        def install() -> bool:
            self.installed.append("restored")
            return not self.has_changed_files

        return install


class FakeExecutor(Generic[PlanT, ResultT]):
    """An Executor over a fake model."""

    def __init__(
        self,
        model: FakeModel[PlanT, ResultT],
        *,
        device_seconds: float = 0.0,
        fail_at_steps: frozenset[int] = frozenset(),
        gate: threading.Event | None = None,
        shows_tokens: bool = False,
    ) -> None:
        """`gate`: every step waits for it, so that a test can act while a step is under way. `shows_tokens`: tokens of
        several decode steps can be read one by one."""
        self.shows_tokens = shows_tokens
        self._model = model
        self.model_info: ModelInfo = model.model_info
        self.eos_token_ids: frozenset[int] = model.eos_token_ids
        self.buckets: Buckets = model.buckets
        self.pages: PageDevice[Any] | None = model.pages
        self.snapshots: PageDevice[Any] | None = model.snapshots
        if model.snapshots is not None:
            model.snapshots.finish_steps = self._finish_steps
        self.weights = FakeWeights()
        self._device_seconds = device_seconds
        self._fail_at_steps = fail_at_steps
        self._gate = gate
        self._num_steps = 0
        self._queue: deque[FakePending[PlanT, ResultT]] = deque()
        self._free_at = 0.0
        """When the device has done everything that was computed so far."""

    @classmethod
    def start(cls, config: Config, options: FakeOptions) -> FakeExecutor[Any, Any]:
        """Return the fake that a server with this `config` would run."""
        if options.start_error is not None:
            raise CheckpointError(options.start_error)
        if options.hangs_at_start:
            threading.Event().wait()
        model: FakeModel[Any, Any]
        model = _vectors(config, options) if config.model.task == "embed" else _tokens(config, options)
        failing = frozenset(options.fail_at_steps)
        return FakeExecutor(model, device_seconds=options.device_seconds, fail_at_steps=failing)

    def submit(self, plan: PlanT) -> FakePending[PlanT, ResultT]:
        self._model.check(plan)
        pending = FakePending(self, plan, self._num_steps, time.monotonic())
        self._num_steps += 1
        self._queue.append(pending)
        return pending

    def add_stats(self, stats: EngineStats) -> None:
        """Count every program as compiled at the start."""
        tables = (self.buckets.decode, self.buckets.mixed, self.buckets.speculate)
        stats.compilations = {"warmup": sum(map(len, tables)), "serving": 0}

    def profile(self, is_on: bool) -> None:
        """There are no other hosts."""

    def close(self) -> None:
        """There is nothing to release."""

    def would_be_done(self, pending: FakePending[PlanT, ResultT]) -> bool:
        """Return True if a device would have finished the step by now; only the oldest step can be finished."""
        return self._queue[0] is pending and time.monotonic() >= self._finish_time(pending, 1)

    def compute_next(self) -> None:
        """Compute the oldest step that waits."""
        pending = self._queue.popleft()
        if self._gate is not None:
            self._gate.wait()
        try:
            if pending.index in self._fail_at_steps:
                raise RuntimeError(f"step {pending.index} fails on purpose")
            pending.outcome = self._timed(pending, self._model.compute(pending.plan))
        except Exception as error:
            pending.outcome = error
            self.lose_state()

    def _finish_steps(self) -> None:
        """Compute the steps that wait."""
        while self._queue:
            self.compute_next()

    def lose_state(self) -> None:
        """Fail all steps under way and forget the model's state, as a device does after a failed step."""
        while self._queue:
            self._queue.popleft().outcome = StepLostError("a step before this one has failed")
        self._model.lose_state()

    def _timed(self, pending: FakePending[PlanT, ResultT], result: Any) -> ResultT:
        """Wait until a device would be done; returns `result` with its device seconds."""
        started = max(pending.started, self._free_at)
        self._free_at = self._finish_time(pending, result.num_steps)
        if self._device_seconds:
            time.sleep(max(0.0, self._free_at - time.monotonic()))
        timed: ResultT = replace(result, device_seconds=self._free_at - started)
        return timed

    def _finish_time(self, pending: FakePending[PlanT, ResultT], num_steps: int) -> float:
        return max(pending.started, self._free_at) + num_steps * self._device_seconds


def _tokens(config: Config, options: FakeOptions) -> FakeTokens:
    limits = resolve_limits("cpu", config.scheduler)
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    num_drafts = config.scheduler.num_speculative_tokens if config.scheduler.has_drafter else 0
    return FakeTokens(
        Buckets(powers_of_two(rows), powers_of_two(tokens), rows, options.max_decode_steps, num_drafts),
        options.num_blocks,
        page_tokens("cpu", config.cache.block_size),
        options.vocab_size,
        max_model_len=min(options.max_model_len, config.model.max_model_len or options.max_model_len),
        eos_token_ids=frozenset(options.eos_token_ids),
        script=options.script,
        returns_experts=config.model.enable_return_routed_experts,
    )


def _vectors(config: Config, options: FakeOptions) -> FakeVectors:
    limits = resolve_embed_limits("cpu", config.scheduler, config.model.max_model_len)
    longest = min(options.max_model_len, limits.max_num_batched_tokens)
    return FakeVectors(
        Buckets((), powers_of_two(limits.max_num_batched_tokens), limits.max_num_seqs),
        page_tokens("cpu", config.cache.block_size),
        options.vocab_size,
        min(config.model.max_model_len or longest, longest),
        options.embedding_size,
    )
