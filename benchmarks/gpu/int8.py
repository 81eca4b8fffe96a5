"""Part 3, weights in 8 and 4 bits and keys and values in 8: decode steps of the same model.

The programs of as many kinds as the part has time for are compiled side by side before the first is measured.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp

from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.steps import StepBench

SECONDS_OF_A_KIND = 17.0
"""Seven took 116 s on an H200 with 16 processors."""
LEAST_KINDS = 2
COMPILE_SHARE = 0.6
"""Fraction of the part's time for compiling."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Types of the weights, and of keys and values; None: as the activations."""

    weights: str
    kv_dtype: jnp.dtype | None = None

    @property
    def name(self) -> str:
        return self.weights if self.kv_dtype is None else f"{self.weights}, KV {self.kv_dtype.name}"


KINDS = (
    Kind("fp8"),
    Kind("int4-weight-only"),
    Kind("none", jnp.dtype(jnp.float8_e4m3fn)),
    Kind("int8"),
    Kind("int8-weight-only"),
    Kind("fp8-weight-only"),
    Kind("fp8-block-weight-only"),
    Kind("nvfp4-weight-only"),
)
"""The first are sure to be compiled in time."""
QUICK_KINDS = (Kind("int4-weight-only"), Kind("int8"))


def run(context: Context) -> None:
    first_device(context)
    kinds: tuple[Kind, ...] = QUICK_KINDS if context.is_quick else KINDS
    batches = (1, 4) if context.is_quick else (1, 32)
    cells = [(batch, 64 if context.is_quick else 1024) for batch in batches]
    context.recorder.expect([kind.name for kind in kinds])
    kinds = kinds[: max(LEAST_KINDS, int(context.recorder.left_s / SECONDS_OF_A_KIND))]
    compile_s = COMPILE_SHARE * context.recorder.left_s
    with ThreadPoolExecutor(len(kinds)) as threads:
        benches = {kind: threads.submit(_compile, context, kind, batches, cells, compile_s) for kind in kinds}
    for kind, bench in benches.items():
        context.recorder.attempt(kind.name, partial(_measure, bench, cells))


def _compile(
    context: Context, kind: Kind, batches: tuple[int, ...], cells: list[tuple[int, int]], compile_s: float
) -> StepBench:
    shape = decoder(TINY if context.is_quick else LLAMA_8B)
    return StepBench(
        context,
        shape,
        server_policy(context, shape, quantization=kind.weights),
        label=kind.name,
        batches=batches,
        chunk=None,
        cells=cells,
        compile_s=compile_s,
        kv_dtype=kind.kv_dtype,
        is_loaded=False,
    )


def _measure(compiled: Future[StepBench], cells: list[tuple[int, int]]) -> None:
    bench = compiled.result()
    bench.load()
    for batch, tokens in cells:
        bench.decode_step(batch, tokens)
    bench.release()
    del bench.params
