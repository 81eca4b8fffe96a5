"""Part 2: every op of `jaxserve_kernels` on the device, fresh random inputs, against `oracle.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.matmul import matmul
from jaxserve_kernels.paged_attention import Scoring, decode_attention, mixed_attention, ragged_layout
from jaxserve_kernels.rope import Rotation, rotate

from benchmarks.gpu import oracle
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device

NUM_THREADS = 8
"""Cases compile side by side: that is what they spend their time with."""
LAYER, NUM_LAYERS = 1, 2
RUBBISH = 7e3
"""What the null page and unused pages hold, which must never be seen."""
PRODUCT_TOLERANCES = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 1e-3}
"""Products are accumulated and returned in float32, whatever the operands are. TF32 would not pass for float32."""
INT8_TOLERANCE = 3e-3
"""A value on the border of two steps may be rounded to either."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Query heads, kv heads, head dim, tokens of a page, sliding window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int | None = None

    def __str__(self) -> str:
        window = "" if self.window is None else f" W{self.window}"
        return f"N{self.num_heads} K{self.num_kv_heads} H{self.head_dim} page {self.page_size}{window}"


SHAPES = (
    Shape(32, 8, 128, 16),
    Shape(32, 8, 128, 64, window=100),
    Shape(9, 3, 64, 16),
    Shape(8, 8, 80, 32, window=33),
    Shape(16, 1, 256, 16),
)
DTYPES = ("bfloat16", "float32", "float16")
DECODE_LENGTHS = (1000, 1, 0, 15, 16, 17, 127, 129)
MIXED_COUNTS = (1, 1, 5, 64, 65, 130, 1)
MIXED_LENGTHS = (300, 1, 5, 64, 90, 400, 17)


def run(context: Context) -> None:
    first_device(context)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for index, (name, check) in enumerate(cases(context)):
            random = np.random.default_rng(context.seed + index)
            threads.submit(context.recorder.attempt, name, partial(check, random))


def cases(context: Context) -> Iterator[tuple[str, Callable[[np.random.Generator], None]]]:
    """Every case by name."""
    shapes = SHAPES[2:3] if context.is_quick else SHAPES
    dtypes = DTYPES[1:2] if context.is_quick else DTYPES
    for shape, dtype in itertools.product(shapes, dtypes):
        yield f"decode {shape} {dtype}", partial(check_decode, context, shape, dtype)
        yield f"mixed {shape} {dtype}", partial(check_mixed, context, shape, dtype)
    for dtype, count in itertools.product(dtypes, (1, 300)):
        yield f"kv_write {count} {dtype}", partial(check_write, context, dtype, count)
    for dtype in dtypes:
        yield f"rotate {dtype}", partial(check_rotate, context, dtype)
    for kind, count, dtype in itertools.product(("plain", "int8 weights", "int8"), (1, 7, 64), dtypes[:2]):
        yield f"matmul {kind} {count} {dtype}", partial(check_matmul, context, kind, dtype, count)


@dataclass(frozen=True, slots=True)
class Pages:
    """A pool, and which of its pages belong to whom."""

    k: np.ndarray
    v: np.ndarray
    tables: np.ndarray

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a row in order: (X, K, H)."""
        pool = (self.k, self.v)
        k, v = (array[LAYER][self.tables[index]].transpose(0, 2, 1, 3) for array in pool)
        return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])


def make_pages(random: np.random.Generator, shape: Shape, dtype: str, num_rows: int, longest: int) -> Pages:
    """Every row has pages of its own, scattered over the pool."""
    per_row = -(-longest // shape.page_size)
    num_pages = num_rows * per_row + 8
    size = (NUM_LAYERS, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    k, v = (random.standard_normal(size, np.float32) for _ in range(2))
    order = random.permutation(num_pages - 1) + 1
    tables = order[: num_rows * per_row].reshape(num_rows, per_row).astype(np.int32)
    for unused in (0, *order[num_rows * per_row :]):
        k[:, unused] = v[:, unused] = RUBBISH
    kind = jnp.dtype(dtype)
    return Pages(k.astype(kind), v.astype(kind), tables)


def check_decode(context: Context, shape: Shape, dtype: str, random: np.random.Generator) -> None:
    lengths = np.array(DECODE_LENGTHS, np.int32)
    pages = make_pages(random, shape, dtype, len(lengths), lengths.max())
    size = (len(lengths), shape.num_heads, shape.head_dim)
    q = random.standard_normal(size, np.float32).astype(jnp.dtype(dtype))
    scale = shape.head_dim**-0.5
    run_op = jax.jit(decode_attention, static_argnames=("scoring",))
    arguments = map(jnp.asarray, (q, pages.k, pages.v, LAYER, pages.tables, lengths))
    found = np.asarray(run_op(*arguments, scoring=Scoring(scale, sliding_window=shape.window)))
    expected = np.zeros(size)
    for row, length in enumerate(lengths):
        if length:
            expected[row] = oracle.attend(q[row : row + 1], *pages.row(row), int(length), scale, shape.window)[0]
    compare(context, f"decode_attention, {shape}, {dtype}", found, expected, oracle.TOLERANCES[dtype])


def check_mixed(context: Context, shape: Shape, dtype: str, random: np.random.Generator) -> None:
    """Two decode rows, chunks of several sizes, a one-token chunk behind them, and padding."""
    counts, lengths = np.array(MIXED_COUNTS), np.array(MIXED_LENGTHS, np.int32)
    num_tokens = int(counts.sum()) + 23
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    pages = make_pages(random, shape, dtype, len(lengths), int(lengths.max()))
    size = (num_tokens, shape.num_heads, shape.head_dim)
    q = random.standard_normal(size, np.float32).astype(jnp.dtype(dtype))
    scale = shape.head_dim**-0.5
    ragged = ragged_layout(jnp.asarray(starts), jnp.int32(2), num_tokens=num_tokens)
    run_op = jax.jit(mixed_attention, static_argnames=("scoring",))
    arguments = map(jnp.asarray, (q, pages.k, pages.v, LAYER, pages.tables, lengths))
    found = np.asarray(run_op(*arguments, ragged, scoring=Scoring(scale, sliding_window=shape.window)))
    expected = np.concatenate(
        [
            oracle.attend(q[starts[row] : starts[row + 1]], *pages.row(row), int(length), scale, shape.window)
            for row, length in enumerate(lengths)
        ]
    )
    compare(context, f"mixed_attention, {shape}, {dtype}", found[: len(expected)], expected, oracle.TOLERANCES[dtype])


def check_write(context: Context, dtype: str, count: int, random: np.random.Generator) -> None:
    """Named slots change and nothing else does, in the same buffers."""
    size = (NUM_LAYERS, 64, 8, 16, 128)
    kind = jnp.dtype(dtype)
    k, v = (random.standard_normal(size, np.float32).astype(kind) for _ in range(2))
    new_k, new_v = (random.standard_normal((count, *size[2:3], size[4]), np.float32).astype(kind) for _ in range(2))
    places = random.permutation((size[1] - 1) * size[3])[:count] + size[3]  # none on the null page
    where, slots = (places // size[3]).astype(np.int32), (places % size[3]).astype(np.int32)
    arguments = tuple(map(jnp.array, (k, v, LAYER, new_k, new_v, where, slots)))  # copies: two of them are donated
    compiled = jax.jit(kv_write, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "every backend this runs on tells its memory"
    found_k, found_v = (np.asarray(array) for array in compiled(*arguments))
    for index, (page, slot) in enumerate(zip(where, slots, strict=True)):
        k[LAYER, page, :, slot], v[LAYER, page, :, slot] = new_k[index], new_v[index]
    is_equal = np.array_equal(found_k, k) and np.array_equal(found_v, v)
    context.recorder.check(f"kv_write, {count} tokens, {dtype}: exact", passed=is_equal)
    is_in_place = memory.alias_size_in_bytes >= k.nbytes + v.nbytes and memory.temp_size_in_bytes < k.nbytes // 2
    context.recorder.check(
        f"kv_write, {count} tokens, {dtype}: in place",
        passed=is_in_place,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def check_rotate(context: Context, dtype: str, random: np.random.Generator) -> None:
    x = random.standard_normal((50, 8, 128), np.float32).astype(jnp.dtype(dtype))
    angles = random.uniform(0, 8192, (50, 64)).astype(np.float32)
    cos, sin = (jnp.asarray(of(angles.astype(np.float64)), jnp.float32) for of in (np.cos, np.sin))
    found = np.asarray(jax.jit(rotate)(jnp.asarray(x), Rotation(cos, sin)))
    compare(context, f"rotate, {dtype}", found, oracle.rotate(x, angles.astype(np.float64)), oracle.TOLERANCES[dtype])


def check_matmul(context: Context, kind: str, dtype: str, count: int, random: np.random.Generator) -> None:
    num_in, num_out = 1024, 768
    x = random.standard_normal((count, num_in), np.float32).astype(jnp.dtype(dtype))
    run_op = jax.jit(matmul, static_argnames=("dynamic",))
    if kind == "plain":
        weight = random.standard_normal((num_out, num_in), np.float32).astype(jnp.dtype(dtype))
        found = run_op(jnp.asarray(x), jnp.asarray(weight))
        expected = x.astype(np.float64) @ weight.astype(np.float64).T
    else:
        weight = random.integers(-127, 128, (num_out, num_in)).astype(np.int8)
        scales = random.uniform(0.001, 0.01, num_out).astype(np.float32)
        found = run_op(*map(jnp.asarray, (x, weight, scales)), dynamic=kind == "int8")
        rows = oracle.quantise(x) if kind == "int8" else x.astype(np.float64)
        expected = rows @ (weight.astype(np.float64).T * scales)
    tolerance = INT8_TOLERANCE if kind == "int8" else PRODUCT_TOLERANCES[dtype]
    name = f"matmul, {kind}, {count} x {num_in} x {num_out}, {dtype}"
    compare(context, name, np.asarray(found), expected, tolerance)


def compare(context: Context, name: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = oracle.vector_error(found, expected)
    context.recorder.check(name, passed=error <= tolerance, error=error, tolerance=tolerance)
