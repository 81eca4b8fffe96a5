"""Only when asked for: what updates of CUDA graphs cost, by decode steps of a random Llama-3.2-1B.

A graph holds addresses; the runtime updates it, launch by launch, when a buffer has another one than before. The parts
of this module differ in the runtime's mode, which their environment sets.
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.shapes import LLAMA_1B, TINY, decoder
from benchmarks.gpu.steps import StepBench

COMPILE_SHARE = 0.7
"""Fraction of the part's time for compiling."""


def run(context: Context) -> None:
    first_device(context)
    rows, tokens = ((1, 4), 64) if context.is_quick else ((1, 32), 512)
    context.recorder.expect([f"decode {count}" for count in rows])
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
    for count in rows:
        context.recorder.attempt(f"decode {count}", partial(bench.decode_step, count, tokens))
