"""Part 3, ops alone at the sizes of one layer of Llama-3.1-8B: each against the bound it cannot pass.

A program repeats the op as the layers of a model would: every repetition waits for the one before it, and reads
other pages, so that nothing stays in a cache that a model would find cold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.matmul import matmul
from jaxserve_kernels.paged_attention import Scoring, decode_attention, mixed_attention, ragged_layout

from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.random_weights import random_pool
from benchmarks.gpu.rig import BLOCK_SIZE
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.timing import Timing, time_calls
from jaxserve.models.config import DecoderConfig
from jaxserve.sharding.mesh import make_sharding

NUM_REPEATS = 8
NUM_TABLES = 4
"""Different page tables that repetitions take in turns."""
MAX_POOL_TOKENS = 256 * 16384
CELL_BUDGET_S = 0.4


def run(context: Context) -> None:
    first_device(context)
    is_quick = context.is_quick
    config = decoder(TINY if is_quick else LLAMA_8B)
    dtype = jnp.dtype(jnp.bfloat16 if context.platform == "cuda" else jnp.float32)
    batches = (1, 2) if is_quick else (1, 8, 32, 128, 256)
    contexts = (64, 128) if is_quick else (512, 4096, 16384)
    prompts = (64,) if is_quick else (512, 4096, 8192)
    num_tokens = 2 * 4 * 128 if is_quick else MAX_POOL_TOKENS
    shape = (1, num_tokens // BLOCK_SIZE + 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    pool = random_pool(shape, dtype, make_sharding(config, 1), context.seed)
    ops = _Ops(context, config, dtype, pool)
    attempt = context.recorder.attempt
    for length, batch in itertools.product(contexts, batches):
        attempt(f"decode {batch} x {length}", partial(ops.decode, batch, length, max(contexts)))
    for length in prompts:
        attempt(f"prefill {length}", partial(ops.prefill, length, max(prompts)))
    for count, kind in itertools.product((1, 8) if is_quick else (1, 32, 256), ("plain", "int8 weights", "int8")):
        attempt(f"matmul {count} {kind}", partial(ops.products, count, kind))
    for count in (1, 8) if is_quick else (1, 256, 2048):
        attempt(f"kv_write {count}", partial(ops.write, count))  # last: it gives the pool away


class _Ops:
    """The pool of one layer, and what is measured over it."""

    def __init__(
        self, context: Context, config: DecoderConfig, dtype: jnp.dtype, pool: tuple[jax.Array, jax.Array]
    ) -> None:
        self._context = context
        self._config = config
        self._dtype = dtype
        self._k, self._v = pool
        self._random = np.random.default_rng(context.seed)
        self._programs: dict[Any, Callable[..., Any]] = {}

    def decode(self, batch: int, length: int, longest: int) -> None:
        """All rows are `length` long. One program serves every length: its trip count is decided at run time."""
        config, context = self._config, self._context
        tables = self._tables(batch, length, longest)
        lengths = jnp.full(batch, length, jnp.int32)
        q = self._normal(batch, config.num_heads, config.head_dim)
        scale = config.head_dim**-0.5

        def repeat(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
            def body(index: jax.Array, q: jax.Array) -> jax.Array:
                return decode_attention(
                    q, k, v, jnp.int32(0), tables[index % NUM_TABLES], lengths, scoring=Scoring(scale)
                )

            last: jax.Array = jax.lax.fori_loop(0, NUM_REPEATS, body, q)
            return last

        program = self._program(("decode", batch), repeat)
        timing = self._time(lambda: program(q, self._k, self._v, tables, lengths))
        num_bytes = 2 * batch * length * config.num_kv_heads * config.head_dim * self._dtype.itemsize
        context.recorder.figure(
            "decode attention, one layer",
            batch=batch,
            context=length,
            us=timing.median_s * 1e6,
            spread=_spread(timing),
            gb_per_s=num_bytes / timing.median_s / 1e9,
            of_copy=context.share_of_copy(num_bytes, timing.median_s),
        )

    def prefill(self, length: int, longest: int) -> None:
        """One prompt, all of it in one pass, causal."""
        config, context = self._config, self._context
        tables = self._tables(1, length, longest)
        starts, lengths = jnp.asarray([0, length], jnp.int32), jnp.asarray([length], jnp.int32)
        q = self._normal(length, config.num_heads, config.head_dim)
        scale = config.head_dim**-0.5

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
            ragged = ragged_layout(starts, jnp.int32(0), num_tokens=length)
            return mixed_attention(q, k, v, jnp.int32(0), table, lengths, ragged, scoring=Scoring(scale))

        program = self._program(("prefill", length), attend)
        timing = self._time(lambda: program(q, self._k, self._v, tables[0]), num_repeats=1)
        flops = 2 * config.num_heads * config.head_dim * length * (length + 1)  # two products over half a square
        context.recorder.figure(
            "prefill attention, one layer",
            tokens=length,
            ms=timing.median_s * 1e3,
            spread=_spread(timing),
            tflop_per_s=flops / timing.median_s / 1e12,
            of_matmul=context.share_of_matmul(flops, timing.median_s),
        )

    def products(self, count: int, kind: str) -> None:
        """Up and down projection of one block, one after the other."""
        config, context = self._config, self._context
        wide, narrow = config.intermediate_size, config.hidden_size
        is_int8 = kind != "plain"
        up, down = self._weight(wide, narrow, is_int8), self._weight(narrow, wide, is_int8)
        up_scales, down_scales = (
            jnp.full(rows, 1 / (74 * columns**0.5), jnp.float32) if is_int8 else None
            for rows, columns in ((wide, narrow), (narrow, wide))
        )
        x = self._normal(count, narrow)

        def repeat(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            def body(_: jax.Array, x: jax.Array) -> jax.Array:
                inner = matmul(x, up, up_scales, dynamic=kind == "int8").astype(x.dtype)
                return matmul(inner, down, down_scales, dynamic=kind == "int8").astype(x.dtype)

            last: jax.Array = jax.lax.fori_loop(0, NUM_REPEATS, body, x)
            return last

        program = self._program(("matmul", count, kind), repeat)
        timing = self._time(lambda: program(x, up, down))
        num_bytes, flops = up.nbytes + down.nbytes, 4 * count * wide * narrow
        context.recorder.figure(
            "products, up and down projection",
            rows=count,
            weights=kind if is_int8 else self._dtype.name,
            us=timing.median_s * 1e6,
            spread=_spread(timing),
            gb_per_s=num_bytes / timing.median_s / 1e9,
            of_copy=context.share_of_copy(num_bytes, timing.median_s),
            of_matmul=context.share_of_matmul(flops, timing.median_s),
        )

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
            spread=_spread(timing),
            gb_per_s=num_bytes / timing.median_s / 1e9,
            of_copy=context.share_of_copy(num_bytes, timing.median_s),
        )

    def _time(self, call: Callable[[], Any], *, num_repeats: int = NUM_REPEATS) -> Timing:
        """Of one repetition."""
        timing = time_calls(call, jax.block_until_ready, budget_s=CELL_BUDGET_S)
        return Timing(
            timing.median_s / num_repeats,
            timing.least_s / num_repeats,
            timing.most_s / num_repeats,
            timing.num_samples,
        )

    def _program(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._programs.setdefault(key, jax.jit(function))

    def _tables(self, batch: int, length: int, longest: int) -> jax.Array:
        """Scattered pages for every row, `NUM_TABLES` times; different ones where the pool has enough."""
        used, width = -(-length // BLOCK_SIZE), -(-longest // BLOCK_SIZE)
        num_pages = self._k.shape[1] - 1
        order = self._random.permutation(num_pages) + 1
        tables = np.zeros((NUM_TABLES, batch, width), np.int32)
        for index in range(NUM_TABLES):
            start = index * batch * used % num_pages
            tables[index, :, :used] = np.roll(order, -start)[: batch * used].reshape(batch, used)
        return jnp.asarray(tables)

    def _normal(self, *shape: int) -> jax.Array:
        return jnp.asarray(self._random.standard_normal(shape, np.float32), self._dtype)

    def _weight(self, rows: int, columns: int, is_int8: bool) -> jax.Array:
        key = jax.random.key(self._random.integers(1 << 30))
        if is_int8:
            return jax.lax.bitcast_convert_type(jax.random.bits(key, (rows, columns), jnp.uint8), jnp.int8)
        return jax.random.normal(key, (rows, columns), self._dtype) * jnp.asarray(columns**-0.5, self._dtype)


def _spread(timing: Timing) -> str:
    """Fastest and slowest sample in the median's place of 1."""
    return f"{timing.least_s / timing.median_s:.2f}-{timing.most_s / timing.median_s:.2f}"
