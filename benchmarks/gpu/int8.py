"""Part 3, weights in 8 and 4 bits: decode steps of the same model, weights alone and activations as well."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.steps import StepBench

COMPILE_SHARE = 0.7
"""Fraction of the remaining time for compiling."""
KINDS: tuple[str, ...] = (
    "fp8",
    "int4-weight-only",
    "int8-weight-only",
    "fp8-weight-only",
    "int8",
    "fp8-block-weight-only",
)
"""The first are sure to be compiled in time."""
QUICK_KINDS = ("int4-weight-only", "int8")


def run(context: Context) -> None:
    first_device(context)
    kinds = QUICK_KINDS if context.is_quick else KINDS
    context.recorder.expect(kinds)
    for kind in kinds:
        context.recorder.attempt(kind, partial(_measure, context, kind))


def _measure(context: Context, kind: str) -> None:
    shape = decoder(TINY if context.is_quick else LLAMA_8B)
    batches = (1, 4) if context.is_quick else (1, 32)
    cells = [(batch, 64 if context.is_quick else 1024) for batch in batches]
    bench = StepBench(
        context,
        shape,
        server_policy(context, shape, quantization=kind),
        label=kind,
        batches=batches,
        chunk=None,
        cells=cells,
        compile_s=COMPILE_SHARE * context.recorder.left_s,
    )
    for batch, tokens in cells:
        bench.decode_step(batch, tokens)
    bench.release()
