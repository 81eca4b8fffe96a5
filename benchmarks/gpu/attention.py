"""Part 3, our own ops alone at the sizes of one layer of Llama-3.1-8B: each against the bound it cannot pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import XLA, Backend
from jaxserve_kernels.kv_write import kv_write

from benchmarks.gpu.ahead import DISTURBED, Programs, Wanted
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
from benchmarks.gpu.rig import BLOCK_SIZE
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.timing import Timing, time_calls
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape

NUM_WRITES = 8
CELL_BUDGET_S = 0.25
COMPILE_SHARE = 0.5
"""Largest fraction of the part's time for compiling."""
POOL_SHARE: Final = 0.7
"""Largest fraction of the device's memory for the pool; the rest holds queries, results and a smaller pool of 8-bit floats."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """All measurements of the part."""

    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    prompts: tuple[int, ...] = (512, 2048, 8192, 32768)
    suffixes: tuple[tuple[int, int, int], ...] = ((1, 100, 32000), (16, 100, 4000))
    """Rows, new tokens of each, and cached ones before them."""
    skewed: tuple[tuple[int, int, int], ...] = ((256, 512, 32768), (32, 1024, 32768))
    """Rows, tokens of all but one of them, and tokens of that one."""
    narrow: tuple[tuple[int, int], ...] = ((1, 8192), (64, 4096), (256, 2048))
    """Rows, and tokens of each, over a pool of 8-bit floats."""
    written: tuple[int, ...] = (1, 256, 2048)
    most_tokens: int | None = None
    """Tokens that the device has room for; None: any number."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the pool: the largest batch fits, if the device has room for it. Otherwise rows share pages, which are still too
        many for a cache."""
        wanted = max(self.batches) * max(self.contexts)
        return wanted if self.most_tokens is None else min(wanted, self.most_tokens)

    @property
    def num_narrow_tokens(self) -> int:
        return max(rows * tokens for rows, tokens in self.narrow)


QUICK = Sizes((1, 2), (64, 128), (64,), ((2, 8, 40),), ((2, 40, 128),), (), (1, 8))


def run(context: Context, wanted_backend: Backend | None = None) -> None:
    """Measure every cell. wanted_backend: None for the one that the server would take."""
    device = first_device(context)
    config = decoder(TINY if context.is_quick else LLAMA_8B)
    heads = layer_heads(context)
    sizes = with_room(QUICK if context.is_quick else Sizes(), heads, device)
    backend = wanted_backend or op_backends(context, config)[-1]
    if backend in XLA:
        context.recorder.note(f"these are XLA's: {why_no_kernels(config) or 'as was asked for'}")
    wanted = max(sizes.batches) * max(sizes.contexts)
    if sizes.num_tokens < wanted:
        context.recorder.note(f"the pool has {sizes.num_tokens} of {wanted} tokens, which the largest batch shares")
    cells: dict[str, Callable[[_Ops], None]] = {}
    for length, batch in itertools.product(sizes.contexts, sizes.batches):
        cells[f"decode {batch} x {length}"] = partial(_Ops.decode, batch=batch, length=length)
    for rows, most, longest in sizes.skewed:
        cells[f"decode {rows} x {most}, one x {longest}"] = partial(_Ops.skewed, batch=rows, most=most, longest=longest)
    for length in sizes.prompts:
        cells[f"prefill {length}"] = partial(_Ops.prefill, length=length)
    for rows, length, prefix in sizes.suffixes:
        cells[f"prefill {rows} x {length} after {prefix}"] = partial(
            _Ops.prefill, length=length, num_rows=rows, prefix=prefix
        )
    if backend not in XLA:
        for batch, length in sizes.narrow:
            cells[f"decode {batch} x {length}, fp8"] = partial(_Ops.narrow, batch=batch, length=length)
    for count in sizes.written:  # last: it gives the pool away
        cells[f"kv_write {count}"] = partial(_Ops.write, count=count)
    context.recorder.expect(cells)
    programs = Programs(wanted_programs(heads, sizes, backend), COMPILE_SHARE * context.recorder.left_s)
    if programs.is_disturbed:
        context.recorder.note(DISTURBED)
    ops = _Ops(context, heads, sizes, backend, programs)
    for name, measure in cells.items():
        context.recorder.attempt(name, partial(measure, ops))


def with_room(sizes: Sizes, heads: Heads, device: jax.Device) -> Sizes:
    """Return the sizes with a pool that the device has room for, if it tells how much memory it has."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return sizes if limit is None else replace(sizes, most_tokens=int(POOL_SHARE * limit) // heads.decode_bytes(1, 1))


def layer_heads(context: Context) -> Heads:
    """Return the attention of one layer of the measured model."""
    config = decoder(TINY if context.is_quick else LLAMA_8B)
    dtype = jnp.dtype(jnp.bfloat16 if context.platform == "cuda" else jnp.float32)
    return Heads(config.num_heads, config.num_kv_heads, config.head_dim, dtype, dtype)


def narrow_heads(heads: Heads) -> Heads:
    return replace(heads, kv_dtype=jnp.dtype(jnp.float8_e4m3fn))


def wanted_programs(heads: Heads, sizes: Sizes, backend: Backend) -> dict[Any, Wanted]:
    """Return the programs by op and size."""
    num_pages, longest = heads.pool(sizes.num_tokens)[1], max(sizes.contexts)
    decode, prefill = public_decode(heads, backend), public_prefill(heads, backend)
    wanted: dict[Any, Wanted] = {}
    for batch in dict.fromkeys([*sizes.batches, *(rows for rows, _, _ in sizes.skewed)]):
        repeats = heads.num_repeats(batch)
        wanted["decode", batch] = decode_program(heads, decode, batch, num_pages, longest, num_repeats=repeats)
    for length in sizes.prompts:
        repeats = heads.num_prefill_repeats(length)
        wanted["prefill", 1, length, 0] = prefill_program(
            heads, prefill, length, num_pages, backend, num_repeats=repeats
        )
    for rows, length, prefix in sizes.suffixes:
        wanted["prefill", rows, length, prefix] = prefill_program(
            heads,
            prefill,
            length,
            num_pages,
            backend,
            num_rows=rows,
            prefix=prefix,
            num_repeats=heads.num_prefill_repeats(rows * length),
        )
    if backend not in XLA:
        narrow, num_pages = narrow_heads(heads), heads.pool(sizes.num_narrow_tokens)[1]
        longest = max(tokens for _, tokens in sizes.narrow)
        for batch, _ in sizes.narrow:
            repeats = narrow.num_repeats(batch)
            wanted["narrow", batch] = decode_program(narrow, decode, batch, num_pages, longest, num_repeats=repeats)
    return wanted


class _Ops:
    """The pool of one layer, and what is measured over it."""

    def __init__(self, context: Context, heads: Heads, sizes: Sizes, backend: Backend, programs: Programs[Any]) -> None:
        self._context = context
        self._heads = heads
        self._sizes = sizes
        self._backend = backend
        self._programs = programs
        self._random = np.random.default_rng(context.seed)
        config = decoder(TINY if context.is_quick else LLAMA_8B)
        self._sharding = make_sharding(config, MeshShape())
        self._k, self._v = random_pool(heads.pool(sizes.num_tokens), heads.dtype, self._sharding, context.seed)

    def decode(self, *, batch: int, length: int) -> None:
        """All rows are `length` long."""
        timing = self._time_decode(self._heads, np.full(batch, length), ("decode", batch), (self._k, self._v))
        num_bytes = self._heads.decode_bytes(batch, length)
        self._record_decode("decode attention, one layer", num_bytes, timing, batch=batch, context=length)

    def skewed(self, *, batch: int, most: int, longest: int) -> None:
        """One row is much longer than the others: a schedule that is not balanced waits for it."""
        lengths = np.full(batch, most)
        lengths[batch // 2] = longest
        timing = self._time_decode(self._heads, lengths, ("decode", batch), (self._k, self._v))
        num_bytes = self._heads.decode_bytes(1, int(lengths.sum()))
        self._record_decode("decode attention, one long row", num_bytes, timing, batch=batch, context=most, one=longest)

    def narrow(self, *, batch: int, length: int) -> None:
        """Over keys and values in 8-bit floats."""
        heads = narrow_heads(self._heads)
        pool = random_pool(heads.pool(self._sizes.num_narrow_tokens), heads.dtype, self._sharding, self._context.seed)
        narrow = (pool.k.astype(heads.kv_dtype), pool.v.astype(heads.kv_dtype))
        timing = self._time_decode(heads, np.full(batch, length), ("narrow", batch), narrow)
        num_bytes = heads.decode_bytes(batch, length)
        self._record_decode("decode attention over fp8, one layer", num_bytes, timing, batch=batch, context=length)

    def _time_decode(
        self, heads: Heads, lengths: np.ndarray, key: tuple[str, int], pool: tuple[jax.Array, jax.Array]
    ) -> Timing:
        batch = len(lengths)
        of_narrow = (tokens for _, tokens in self._sizes.narrow)
        longest = max(self._sizes.contexts if key[0] == "decode" else of_narrow)
        tables = scattered_tables(self._random, pool[0].shape[1], batch, int(lengths.max()), longest)
        arguments = (queries(self._random, heads, batch), *pool, tables, jnp.asarray(lengths, jnp.int32))
        program = self._programs[key]
        return self._time(lambda: program(*arguments), num_repeats=heads.num_repeats(batch))

    def _record_decode(self, table: str, num_bytes: int, timing: Timing, **cell: int) -> None:
        self._context.recorder.figure(
            table,
            **cell,
            backend=self._backend,
            us=timing.median_s * 1e6,
            spread=timing.spread,
            gb_per_s=num_bytes / timing.median_s / 1e9,
            of_copy=self._context.share_of_copy(num_bytes, timing.median_s),
        )

    def prefill(self, *, length: int, num_rows: int = 1, prefix: int = 0) -> None:
        context, heads = self._context, self._heads
        tables = scattered_tables(self._random, self._k.shape[1], num_rows, prefix + length, prefix + length)
        q = queries(self._random, heads, num_rows * length)
        program = self._programs["prefill", num_rows, length, prefix]
        repeats = heads.num_prefill_repeats(num_rows * length)
        timing = self._time(lambda: program(q, self._k, self._v, tables[0]), num_repeats=repeats)
        flops = num_rows * heads.prefill_flops(length, prefix)
        context.recorder.figure(
            "prefill attention, one layer",
            rows=num_rows,
            tokens=length,
            prefix=prefix,
            backend=self._backend,
            ms=timing.median_s * 1e3,
            spread=timing.spread,
            tflop_per_s=flops / timing.median_s / 1e12,
            of_matmul=context.share_of_matmul(flops, timing.median_s),
        )

    def write(self, *, count: int) -> None:
        """One layer's new keys and values into scattered pages; the pool is donated and comes back."""
        heads, context = self._heads, self._context
        new_k, new_v = (
            jnp.asarray(self._random.standard_normal((count, heads.num_kv_heads, heads.dim), np.float32), heads.dtype)
            for _ in range(2)
        )
        places = self._random.permutation(self._k.shape[1] - 1)[:count] + 1
        pages = jnp.asarray(places, jnp.int32)
        slots = jnp.asarray(self._random.integers(0, BLOCK_SIZE, count), jnp.int32)

        def repeat(
            k: jax.Array, v: jax.Array, new_k: jax.Array, new_v: jax.Array, pages: jax.Array, slots: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            for index in range(NUM_WRITES):
                k, v = kv_write(k, v, jnp.int32(0), new_k, new_v, pages, (slots + index) % BLOCK_SIZE)
            return k, v

        program = jax.jit(repeat, donate_argnums=(0, 1))

        def call() -> jax.Array:
            self._k, self._v = program(self._k, self._v, new_k, new_v, pages, slots)
            return self._k

        timing = self._time(call, num_repeats=NUM_WRITES)
        num_bytes = 2 * (new_k.nbytes + new_v.nbytes)  # read here, written there
        context.recorder.figure(
            "kv_write, one layer",
            tokens=count,
            us=timing.median_s * 1e6,
            spread=timing.spread,
            gb_per_s=num_bytes / timing.median_s / 1e9,
            of_copy=context.share_of_copy(num_bytes, timing.median_s),
        )

    def _time(self, call: Callable[[], Any], *, num_repeats: int) -> Timing:
        """Return the time of one repetition."""
        return time_calls(call, jax.block_until_ready, budget_s=CELL_BUDGET_S).of_one(num_repeats)
