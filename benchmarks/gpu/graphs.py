"""CUDA graphs at run time: when the runtime records and updates them, and which buffers change their addresses.

A decode step of a small model, by the server's programs and runner. The runtime's own log, which this part's
environment turns on, names every record and update; addresses are asked of the arrays.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax

from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.plans import decoding_rows
from benchmarks.gpu.random_weights import host_leaves
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.shapes import TINY, decoder
from benchmarks.gpu.steps import DecodeSteps
from jaxserve.runner.inputs import programs
from jaxserve.runner.runner import Runner
from jaxserve.runner.state import DeviceState
from jaxserve.scheduler.plan import Buckets

ROWS, TOKENS, NUM_STEPS = 8, 64, 8
MOST_MESSAGES = 12
_LOGGED = re.compile(r"(?:command_buffer|cuda_graph)\w*\.cc:\d+\] *(.*)")


def run(context: Context) -> None:
    first_device(context)
    kinds = ("first", "second", "third", "overlapped", "synchronous")
    context.recorder.expect([*(f"steps, {kind}" for kind in kinds), "addresses"])
    shape = decoder(TINY)
    rig = Rig(shape, server_policy(context, shape), num_blocks=129, max_model_len=256)
    wanted = programs(Buckets(decode=(ROWS,), mixed=(), max_num_seqs=ROWS), rig.max_pages)
    made, _ = rig.compile(wanted, context.recorder.left_s)
    state = rig.state(made)
    params = rig.place(host_leaves(rig.skeleton, context.seed))
    runner = Runner(rig.task, params, state, {program: each.executable for program, each in made.items()})
    rows = decoding_rows(wanted[0], ROWS, TOKENS + 8 * NUM_STEPS, rig.num_blocks, context.seed)
    steps = DecodeSteps(runner, rows, TOKENS)

    def measure(kind: str) -> None:
        count = NUM_STEPS if kind in ("overlapped", "synchronous") else 1
        log = context.folder / f"{kind}.log"
        with errors_to(log):
            if kind == "overlapped":
                steps.overlapped(count)
            else:
                steps.synchronous(count)
        messages = logged(log.read_text(encoding="utf-8", errors="replace"))
        if not messages:
            context.recorder.note(f"{kind} steps: the runtime logged nothing of command buffers")
        for message, times in messages.most_common(MOST_MESSAGES):
            context.recorder.figure("log of command buffers", steps=kind, message=message, per_step=times / count)

    for kind in kinds:
        context.recorder.attempt(f"steps, {kind}", partial(measure, kind))
    context.recorder.attempt("addresses", partial(_addresses, context, state, steps))


def _addresses(context: Context, state: DeviceState, steps: DecodeSteps) -> None:
    """Count the different addresses of what steps return: each new one means an update of the graph."""
    for kind, is_overlapped in (("overlapped", True), ("synchronous", False)):
        outputs: set[int] = set()
        kept: set[tuple[int, ...]] = set()
        before = None
        for _ in range(NUM_STEPS):
            pending = steps.submit()
            if before is not None and is_overlapped:
                before.result()
            outputs.add(_address(pending.outputs[0]))
            kept.add(tuple(_address(array) for array in jax.tree.leaves(state.arrays)))
            if not is_overlapped:
                pending.result()
            before = pending
        if before is not None and is_overlapped:
            before.result()
        context.recorder.figure("addresses", steps=kind, count=NUM_STEPS, of_outputs=len(outputs), of_state=len(kept))


def _address(array: jax.Array) -> int:
    return int(array.unsafe_buffer_pointer())


def logged(text: str) -> Counter[str]:
    """Count the messages of the runtime's graphs in its log; numbers and addresses do not tell messages apart."""
    found = (match.group(1) for match in map(_LOGGED.search, text.splitlines()) if match)
    return Counter(re.sub(r"0x[0-9a-f]+|\d+", "#", message)[:100] for message in found)


@contextmanager
def errors_to(file: Path) -> Iterator[None]:
    """Send what this process writes to its standard error, in whatever language, to `file`."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with file.open("wb") as target:
            os.dup2(target.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
