"""Only when asked for: what handing over a step costs, and updates of CUDA graphs, by decode steps of a random Llama-3.2-1B.

A graph holds addresses; the runtime updates it, launch by launch, when a buffer has another one than before. The parts
of this module differ in the runtime's mode, which their environment sets. Everything is measured twice: as a server
runs, and when free chunks of all small sizes lie between used ones, so that small buffers of a step fit in there and
those of temporaries could stay where they are.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.graphs import errors_to
from benchmarks.gpu.shapes import LLAMA_1B, TINY, decoder
from benchmarks.gpu.steps import DecodeSteps, StepBench
from jaxserve.runner.inputs import Program
from jaxserve.runner.runner import Executable, Runner

COMPILE_SHARE = 0.7
"""Fraction of the part's time for compiling."""
NUM_STEPS = 16
SMALL_BYTES = tuple(1 << power for power in range(8, 21))
CHUNKS_OF_A_SIZE = 16


def run(context: Context) -> None:
    first_device(context)
    rows, tokens = ((2, 4), 64) if context.is_quick else ((1, 32, 128), 512)
    kinds = ("as served", "small free chunks")
    context.recorder.expect([f"{kind}, {count} rows" for kind in kinds for count in rows])
    shape = decoder(TINY if context.is_quick else LLAMA_1B)
    bench = StepBench(
        context,
        shape,
        server_policy(context, shape),
        label=context.folder.name,
        batches=rows,
        chunk=None,
        cells=[(count, tokens) for count in rows],
        compile_s=COMPILE_SHARE * context.recorder.left_s,
    )
    timed = {program: Timed(made.executable) for program, made in bench.made.items()}
    bench.release()
    bench.runner = Runner(bench.rig.task, bench.params, bench.rig.state(bench.made, pool_seed=context.seed), timed)
    kept: list[jax.Array] = []
    for kind in kinds:
        kept += small_free_chunks() if kind == "small free chunks" else []
        for count in rows:
            context.recorder.attempt(
                f"{kind}, {count} rows", partial(measure, context, bench, timed, kind, count, tokens)
            )


def measure(
    context: Context, bench: StepBench, timed: Mapping[Program, Timed], kind: str, count: int, tokens: int
) -> None:
    """Time decode steps of `count` rows with `tokens` each and what their submits consist of; count updates of their graph."""
    rows = bench.rows(bench.made, count, tokens)
    if rows is None:
        raise LookupError("the rows do not fit the memory")
    steps = DecodeSteps(bench.runner, rows, tokens - 1)
    steps.warm_up()
    step_s, _ = steps.stream(NUM_STEPS)
    parts = parts_of_a_submit(timed[rows.program], steps)
    log = context.folder / "updates.log"
    with errors_to(log):
        steps.overlapped(NUM_STEPS)
    updates = updates_in(log.read_text(encoding="utf-8", errors="replace"))
    context.recorder.figure(
        "handing over a step", memory=kind, batch=count, step_ms=step_s * 1e3, **parts, steps=NUM_STEPS, **updates
    )


class Timed:
    """An executable that remembers how long its calls took the host, in seconds."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self.calls_s: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        started_s = time.perf_counter()
        outputs = self._executable(*arguments)
        self.calls_s.append(time.perf_counter() - started_s)
        return outputs


def parts_of_a_submit(timed: Timed, steps: DecodeSteps) -> dict[str, float]:
    """Return medians over overlapped steps, in microseconds: all of a submit, the program's call, and the rest in Python."""
    before, submits_s = steps.submit(), []
    timed.calls_s.clear()
    for _ in range(NUM_STEPS):
        started_s = time.perf_counter()
        pending = steps.submit()
        submits_s.append(time.perf_counter() - started_s)
        before.result()
        before = pending
    before.result()
    submit_us, call_us = statistics.median(submits_s) * 1e6, statistics.median(timed.calls_s) * 1e6
    return {"submit_us": submit_us, "call_us": call_us, "rest_us": submit_us - call_us}


def updates_in(text: str) -> dict[str, float | None]:
    """Return what the runtime's log says of updates: their number, median time, commands, and buffers that had moved."""
    times = [int(found) for found in re.findall(r"Updated command buffer in (\d+)", text)]
    moved = [int(found) for found in re.findall(r"updated_allocs=(\d+)", text)]
    commands = {int(found) for found in re.findall(r"num_commands=(\d+)", text)}
    return {
        "updates": len(times),
        "median_us": statistics.median(times) if times else None,
        "buffers_moved": statistics.median(moved) if moved else None,
        "commands": max(commands, default=None),
    }


def small_free_chunks() -> list[jax.Array]:
    """Leave free chunks of many sizes between used ones, which are returned and must be kept."""
    kept: list[jax.Array] = []
    for size in SMALL_BYTES:
        chunks = [jax.device_put(np.zeros(size, np.uint8)) for _ in range(CHUNKS_OF_A_SIZE)]
        jax.block_until_ready(chunks)
        for chunk in chunks[::2]:
            chunk.delete()
        kept += chunks[1::2]
    return kept
