"""Checks in processes of their own, some side by side: one that crashes or hangs takes no other with it.

A CUDA error stays with its process: no later call of that process succeeds. So a process ends with the first check
that leaves its device unusable, or is killed when a check takes too long, and what it had still to do goes to fresh
ones.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.gpu import device
from benchmarks.gpu.context import Context
from benchmarks.gpu.records import Recorder

Stage = Literal["starts", "prepares", "runs", "done"]
LIMITS_S: Mapping[Stage, float] = {"starts": 40.0, "prepares": 40.0, "runs": 8.0, "done": 20.0}
"""Longest time without a message: starting a process, compiling, running, and beginning the next check."""
POLL_S = 0.5


@dataclass(frozen=True)
class Bench:
    """Input of a check."""

    recorder: Recorder
    random: np.random.Generator
    seed: int
    tell: Callable[[Stage], None]

    def compile(self, function: Callable[..., Any], *arguments: Any, donate: Sequence[int] = ()) -> jax.stages.Compiled:
        """The program for these arguments. From here on the check has the little time of `runs`."""
        compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
        self.tell("runs")
        return compiled


Check = Callable[[Bench], None]


@dataclass
class _Worker:
    """A process, the checks that it has still to end, the current one first, and since when it is silent."""

    process: Any
    connection: multiprocessing.connection.Connection
    names: list[str]
    stage: Stage = "starts"
    since_s: float = field(default_factory=time.monotonic)

    def hear(self) -> bool:
        """Take one message; False where there will be none any more."""
        try:
            self.stage = self.connection.recv()
        except EOFError:
            return False
        self.since_s = time.monotonic()
        if self.stage == "done":
            self.names.pop(0)
        return True

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.since_s > LIMITS_S[self.stage]

    def end(self, recorder: Recorder, reason: str | None) -> list[str]:
        """Stop the process; the check that it did not survive is named, the others are handed back."""
        if reason:
            self.process.kill()
        self.process.join()
        self.connection.close()
        if self.names and (reason or self.stage != "done"):
            recorder.problem(self.names.pop(0), reason or f"its process ended in it, exit code {self.process.exitcode}")
        return self.names


def run_all(context: Context, module: str, names: Sequence[str], num_processes: int) -> None:
    """Do those of `module`'s `checks(context)`, a mapping of names, that are named."""
    recorder = context.recorder
    todo, workers = list(names), list[_Worker]()
    while (todo or workers) and recorder.left_s > 0:
        free = num_processes - len(workers)
        shares = [todo[first::free] for first in range(min(free, len(todo)))]
        workers += [_start(context, module, share) for share in shares]
        todo = []
        heard = multiprocessing.connection.wait([worker.connection for worker in workers], POLL_S)
        for worker in list(workers):
            is_over = worker.connection in heard and not worker.hear()
            if is_over or worker.is_late:
                late = None if is_over else f"killed: silent for {LIMITS_S[worker.stage]:.0f} s ({worker.stage})"
                todo += worker.end(recorder, late)
                workers.remove(worker)
    for worker in workers:
        todo += worker.end(recorder, "killed: the part's time was up")
    for name in todo:
        recorder.problem(name, "not begun: the part's time was up")


def _start(context: Context, module: str, names: list[str]) -> _Worker:
    fresh = multiprocessing.get_context("spawn")
    ours, theirs = fresh.Pipe(duplex=False)
    process = fresh.Process(target=_work, args=(context, module, list(names), theirs), daemon=True)
    process.start()
    theirs.close()  # so that its end is seen here
    return _Worker(process, ours, names)


def _work(context: Context, module: str, names: list[str], connection: multiprocessing.connection.Connection) -> None:
    """The process: one check after the other while the device is well."""
    checks: Mapping[str, Check] = import_module(module).checks(context)
    order = list(checks)
    for name in names:
        connection.send("prepares")
        seed = context.seed + order.index(name)
        bench = Bench(context.recorder, np.random.default_rng(seed), seed, connection.send)
        is_done = context.recorder.attempt(name, partial(checks[name], bench))
        connection.send("done")
        if not is_done and not device.is_well():
            break
