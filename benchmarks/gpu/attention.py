"""Part 3, ops alone at the sizes of one layer of Llama-3.1-8B: each against the bound it cannot pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import kv_write

from benchmarks.gpu.ahead import Programs, Wanted
from benchmarks.gpu.attention_programs import (
    Heads,
    decode_program,
    prefill_program,
    public_decode,
    public_prefill,
    queries,
    scattered_tables,
)
from benchmarks.gpu.backends import op_backends, why_no_kernels
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.random_weights import random_pool
from benchmarks.gpu.records import Value, one_line
from benchmarks.gpu.rig import BLOCK_SIZE
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.timing import Timing, time_calls
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.sharding.mesh import make_sharding

NUM_REPEATS = 8
CELL_BUDGET_S = 0.25
COMPILE_SHARE = 0.5
"""Largest fraction of the part's time for compiling."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """One measurement."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    prompts: tuple[int, ...] = (512, 2048, 8192, 32768)
    written: tuple[int, ...] = (1, 256, 2048)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pool: the largest batch fits."""
        return max(self.batches) * max(self.contexts)


QUICK = Sizes((1, 2), (64, 128), (64,), (1, 8))


def run(context: Context) -> None:
    first_device(context)
    config = decoder(TINY if context.is_quick else LLAMA_8B)
    dtype = jnp.dtype(jnp.bfloat16 if context.platform == "cuda" else jnp.float32)
    sizes = QUICK if context.is_quick else Sizes()
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, dtype, dtype)
    backends = op_backends(context, config)
    if len(backends) == 1:
        context.recorder.note(f"only the reference is measured: {why_no_kernels(config) or 'as was asked for'}")
    programs = Programs(wanted_programs(heads, sizes, backends), COMPILE_SHARE * context.recorder.left_s)
    pool = random_pool(heads.pool(sizes.num_tokens), dtype, make_sharding(config, 1), context.seed)
    ops = _Ops(context, config, heads, sizes, backends, programs, pool)
    attempt = context.recorder.attempt
    for length, batch in itertools.product(sizes.contexts, sizes.batches):
        attempt(f"decode {batch} x {length}", partial(ops.decode, batch, length))
    for length in sizes.prompts:
        attempt(f"prefill {length}", partial(ops.prefill, length))
    for count in sizes.written:
        attempt(f"kv_write {count}", partial(ops.write, count))  # last: it gives the pool away


def wanted_programs(heads: Heads, sizes: Sizes, backends: tuple[Backend, ...]) -> dict[Any, Wanted]:
    """Seconds of attention by op, backend and size."""
    num_pages, longest = heads.pool(sizes.num_tokens)[1], max(sizes.contexts)
    wanted: dict[Any, Wanted] = {}
    for backend in backends:
        for batch in sizes.batches:
            attend = public_decode(heads, backend)
            wanted["decode", backend, batch] = decode_program(heads, attend, batch, num_pages, longest)
        for length in sizes.prompts:
            attend = public_prefill(heads, backend)
            wanted["prefill", backend, length] = prefill_program(heads, attend, length, num_pages, backend)
    return wanted


class _Ops:
    """The pool of one layer, and what is measured over it."""

    def __init__(
        self,
        context: Context,
        config: DecoderConfig,
        heads: Heads,
        sizes: Sizes,
        backends: tuple[Backend, ...],
        programs: Programs[Any],
        pool: tuple[jax.Array, jax.Array],
    ) -> None:
        self._context = context
        self._config = config
        self._heads = heads
        self._sizes = sizes
        self._backends = backends
        self._programs = programs
        self._dtype = heads.dtype
        self._k, self._v = pool
        self._random = np.random.default_rng(context.seed)

    def decode(self, batch: int, length: int) -> None:
        """All rows are `length` long."""
        context, heads = self._context, self._heads
        num_bytes, num_repeats = heads.decode_bytes(batch, length), heads.num_repeats(batch, length)
        tables = scattered_tables(self._random, self._k.shape[1], batch, length, max(self._sizes.contexts))
        lengths = jnp.full(batch, length, jnp.int32)
        arguments = (queries(self._random, heads, batch), self._k, self._v, tables, lengths, jnp.int32(num_repeats))
        timings = self._side_by_side("decode", batch, arguments, num_repeats)
        columns: dict[str, Value] = {"batch": batch, "context": length, "backend": self._backends[-1]}
        for prefix, name in (("", self._backends[-1]), ("reference_", "reference")):
            if name in timings:
                columns[f"{prefix}us"] = timings[name].median_s * 1e6
                columns[f"{prefix}spread"] = timings[name].spread
                columns[f"{prefix}gb_per_s"] = num_bytes / timings[name].median_s / 1e9
                columns[f"{prefix}of_copy"] = context.share_of_copy(num_bytes, timings[name].median_s)
        context.recorder.figure("decode attention, one layer", **columns)

    def prefill(self, length: int) -> None:
        """Beside it cuDNN's attention over keys and values that are not in pages."""
        context, heads = self._context, self._heads
        tables = scattered_tables(self._random, self._k.shape[1], 1, length, length)
        q = queries(self._random, heads, length)
        timings = self._side_by_side("prefill", length, (q, self._k, self._v, tables[0]), 1)
        if context.platform == "cuda":
            timings |= self._cudnn(length)
        columns: dict[str, Value] = {"tokens": length, "backend": self._backends[-1]}
        flops = heads.prefill_flops(length)
        for prefix, name in (("", self._backends[-1]), ("reference_", "reference"), ("cudnn_", "cudnn")):
            if name in timings:
                columns[f"{prefix}ms"] = timings[name].median_s * 1e3
                columns[f"{prefix}spread"] = timings[name].spread
                columns[f"{prefix}tflop_per_s"] = flops / timings[name].median_s / 1e12
                columns[f"{prefix}of_matmul"] = context.share_of_matmul(flops, timings[name].median_s)
        context.recorder.figure("prefill attention, one layer", **columns)

    def _side_by_side(self, op: str, size: int, arguments: tuple[jax.Array, ...], repeats: int) -> dict[str, Timing]:
        """By backend, without those that fail. The reference first: a kernel may take the device along."""
        timings: dict[str, Timing] = {}

        def measure(backend: Backend) -> None:
            program = self._programs[op, backend, size]
            timings[backend] = self._time(partial(program, *arguments), num_repeats=repeats)

        for backend in self._backends:
            self._context.recorder.attempt(f"{op} {size}, {backend}", partial(measure, backend))
        return timings

    def _cudnn(self, length: int) -> dict[str, Timing]:
        """Empty, and a note, where it cannot be used."""
        heads = self._heads
        q = queries(self._random, heads, length)[None]
        k, v = (self._normal(1, length, heads.num_kv_heads, heads.dim) for _ in range(2))
        attend = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"))
        try:
            return {"cudnn": self._time(lambda: attend(q, k, v), num_repeats=1)}
        except Exception as error:  # another library's: whatever it is, ours are measured
            self._context.recorder.note(f"no attention by cuDNN for {length} tokens: {one_line(error)}")
            return {}

    def write(self, count: int) -> None:
        """One layer's new keys and values into scattered pages; the pool is donated and comes back."""
        config, context = self._config, self._context
        new_k, new_v = (self._normal(count, config.num_kv_heads, config.head_dim) for _ in range(2))
        places = self._random.permutation(self._k.shape[1] - 1)[:count] + 1
        pages = jnp.asarray(places, jnp.int32)
        slots = jnp.asarray(self._random.integers(0, BLOCK_SIZE, count), jnp.int32)

        def repeat(
            k: jax.Array, v: jax.Array, new_k: jax.Array, new_v: jax.Array, pages: jax.Array, slots: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            def body(index: jax.Array, pool: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                return kv_write(*pool, jnp.int32(0), new_k, new_v, pages, (slots + index) % BLOCK_SIZE)

            last: tuple[jax.Array, jax.Array] = jax.lax.fori_loop(0, NUM_REPEATS, body, (k, v))
            return last

        program = jax.jit(repeat, donate_argnums=(0, 1))

        def call() -> jax.Array:
            self._k, self._v = program(self._k, self._v, new_k, new_v, pages, slots)
            return self._k

        timing = self._time(call)
        num_bytes = 2 * (new_k.nbytes + new_v.nbytes)  # read here, written there
        context.recorder.figure(
            "kv_write, one layer",
            tokens=count,
            us=timing.median_s * 1e6,
            spread=timing.spread,
            gb_per_s=num_bytes / timing.median_s / 1e9,
            of_copy=context.share_of_copy(num_bytes, timing.median_s),
        )

    def _time(self, call: Callable[[], Any], *, num_repeats: int = NUM_REPEATS) -> Timing:
        """Return the time of one repetition."""
        timing = time_calls(call, jax.block_until_ready, budget_s=CELL_BUDGET_S)
        return Timing(
            timing.median_s / num_repeats,
            timing.least_s / num_repeats,
            timing.most_s / num_repeats,
            timing.num_samples,
        )

    def _normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self._random.standard_normal(shape, np.float32), self._dtype)
