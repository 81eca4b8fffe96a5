"""Part 3, matmuls of few tokens with the weights of Llama-3.1-8B: bfloat16, 8 and 4 bits, by XLA and by our kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import oracle
from benchmarks.gpu.ahead import DISTURBED, Programs
from benchmarks.gpu.backends import why_no_kernels
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.matmul_programs import Chain, Shapes, Weights, candidates, cells, served_sizes
from benchmarks.gpu.records import one_line
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.timing import Timing, time_calls

TOKENS = (1, 32, 128)
CELL_BUDGET_S = 0.1
COMPILE_SHARE = 0.6
"""Largest fraction of the part's time for compiling."""
TOLERANCE = 0.05
"""Between two ways to compute the same chain: results are rounded to bfloat16 after every matmul."""


def run(context: Context) -> None:
    first_device(context)
    config = decoder(TINY if context.is_quick else LLAMA_8B)
    reason = why_no_kernels(config) if context.attention_backend == "auto" else "as was asked for"
    if reason is not None:
        context.recorder.note(f"only XLA's matmuls are measured: {reason}")
    bench = MatmulBench(context)
    tokens = TOKENS[:2] if context.is_quick else TOKENS
    chains = {
        (name, count): measured(shapes, count, bench.dtype, has_kernel=reason is None)
        for (name, shapes), count in itertools.product(cells(config).items(), tokens)
    }
    cases = {
        f"{name}, {count} tokens, {types}": (name, [each for each in found if each.types == types])
        for (name, count), found in chains.items()
        for types in dict.fromkeys(each.types for each in found)
    }
    context.recorder.expect(cases)
    bench.compile([each for found in chains.values() for each in found], COMPILE_SHARE)
    for label, (name, of_types) in cases.items():
        context.recorder.attempt(label, partial(bench.compare, name, of_types))


def measured(shapes: Shapes, count: int, dtype: jnp.dtype, *, has_kernel: bool) -> list[Chain]:
    """The compared implementations; for the kernel the block sizes that are tried first if no tuning exists."""
    plain, narrow = Chain(shapes, dtype.name, count), Chain(shapes, "int8", count)
    sizes = candidates(count, shapes)[:1] if has_kernel else []
    small = {narrow: sizes, replace(narrow, is_dynamic=True): sizes}
    of_four_bits = Chain(shapes, "int4", count)
    served = served_sizes(of_four_bits, jnp.dtype(jnp.bfloat16)) if has_kernel else None
    small[of_four_bits] = [] if served is None else [served]
    return [plain, *(replace(each, tuning=size) for each, tried in small.items() for size in (None, *tried))]


class MatmulBench:
    """Compiles chains, runs them over the same numbers, and records what they take."""

    def __init__(self, context: Context) -> None:
        self.dtype = jnp.dtype(jnp.bfloat16 if context.platform == "cuda" else jnp.float32)
        self._context = context
        self._weights = Weights(context.seed, self.dtype)
        self._programs: Programs[Chain] | None = None

    def compile(self, chains: list[Chain], share: float) -> None:
        """Before any of them is measured; takes at most a share of the time that is left."""
        wanted = {each: each.wanted(self.dtype) for each in chains}
        self._programs = Programs(wanted, share * self._context.recorder.left_s)
        if self._programs.is_disturbed:
            self._context.recorder.note(DISTURBED)

    def compare(self, name: str, chains: list[Chain]) -> dict[Chain, float]:
        """Seconds of chains of the same types: XLA's matmul first, then those that give what it gave."""
        seconds: dict[Chain, float] = {}
        x, expected = self._weights.activations(chains[0]), None
        for chain in chains:
            try:
                assert self._programs is not None, "compiled before"
                call = partial(self._programs[chain], x, *self._weights.of(chain))
                found = np.asarray(call().astype(jnp.float32))
            except Exception as error:  # most often too little shared memory
                self._context.recorder.note(f"{name}, {_label(chain)}: left out: {one_line(error)}")
                continue
            if chain.tuning is None:
                expected = found
            elif not self._is_right(name, chain, found, expected):
                continue
            timing = time_calls(call, jax.block_until_ready, budget_s=CELL_BUDGET_S)
            seconds[chain] = timing.median_s / chain.num_repeats
            self._record(name, chain, timing)
        return seconds

    def _is_right(self, name: str, chain: Chain, found: np.ndarray, expected: np.ndarray | None) -> bool:
        """Compare with XLA's matmul; the result is unknown if that failed."""
        if expected is None:
            return False
        error = oracle.vector_error(found, expected)
        label = f"{name}, {chain.num_tokens} tokens, {_label(chain)}: as by XLA"
        self._context.recorder.check(label, passed=error <= TOLERANCE, error=error, tolerance=TOLERANCE)
        return error <= TOLERANCE

    def _record(self, name: str, chain: Chain, timing: Timing) -> None:
        seconds = timing.median_s / chain.num_repeats
        self._context.recorder.figure(
            "matmuls of few tokens",
            weights_of=name,
            tokens=chain.num_tokens,
            weights=_label(chain),
            us=seconds * 1e6,
            spread=timing.spread,
            gb_per_s=chain.num_bytes / seconds / 1e9,
            of_copy=self._context.share_of_copy(chain.num_bytes, seconds),
            of_matmul=self._context.share_of_matmul(chain.flops, seconds),
        )


def _label(chain: Chain) -> str:
    if chain.tuning is None:
        return f"{chain.types}, XLA"
    sizes = chain.tuning
    return f"{chain.types}, kernel {sizes.workers} x {sizes.rows} x {sizes.tile} x {sizes.stages}"
