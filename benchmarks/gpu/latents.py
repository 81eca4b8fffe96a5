"""Attention over latent vectors (MLA) alone, at the sizes of a layer of DeepSeek-V3, by our kernel and by XLA: on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.latent_attention.api import decode_attention, mixed_attention, unsupported
from jaxserve_kernels.paged_attention import Scoring, ragged_layout

from benchmarks.gpu.attention import CELL_BUDGET_S
from benchmarks.gpu.attention_programs import NUM_TABLES, REPEATED_BYTES, scattered_tables
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.rig import BLOCK_SIZE
from benchmarks.gpu.timing import time_calls
from jaxserve.runner.backend import chip_of, pallas_backend

WIDTH, VALUE_WIDTH = 576, 512
_MOST_REPEATS = 16
_QUICK_TOKENS = 1 << 12
_MOST_TOKENS = 1 << 20
"""Tokens of the pool: 1.2 GB in bfloat16, more than any L2 cache holds."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    num_heads: int
    rows: int
    context: int
    queries: int = 1
    """Tokens of each row that attend: more than one are drafts to verify."""

    def __str__(self) -> str:
        return f"{self.rows} x {self.context}, {self.num_heads} heads, {self.queries} tokens a row"

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors, read once, in bfloat16."""
        return self.rows * self.context * WIDTH * 2


CELLS = (
    *(Cell(16, rows, context) for rows, context in ((1, 32768), (8, 1024), (32, 1024), (32, 8192), (128, 4096))),
    Cell(128, 8, 4096),
    Cell(128, 64, 4096),
    *(Cell(16, rows, 4096, queries=2) for rows in (8, 64)),
    Cell(16, 64, 4096, queries=4),
)
QUICK = (Cell(4, 2, 40), Cell(4, 2, 40, queries=2))


def run(context: Context) -> None:
    """Measure every cell."""
    device = first_device(context)
    dtype = jnp.dtype(jnp.bfloat16 if context.platform == "cuda" else jnp.float32)
    num_tokens = _QUICK_TOKENS if context.is_quick else _MOST_TOKENS
    pool_shape = (1, num_tokens // BLOCK_SIZE, 1, BLOCK_SIZE, WIDTH)
    pages = jax.random.normal(jax.random.key(context.seed), pool_shape, dtype)
    backends = backends_of(device, pool_shape, dtype)
    if backends[0] != "mosaic_gpu":
        context.recorder.note("there is no kernel for latent attention on this device: these are XLA's")
    cells = {
        f"{cell}, {backend}": partial(_measure, context, cell, backend, pages)
        for backend in backends
        for cell in (QUICK if context.is_quick else CELLS)
    }
    context.recorder.expect(cells)
    for name, measure in cells.items():
        context.recorder.attempt(name, measure)


def backends_of(device: jax.Device, pool_shape: tuple[int, ...], dtype: jnp.dtype) -> Sequence[Backend]:
    """Return the kernel's backend, if the device has a kernel, and XLA's."""
    pallas = pallas_backend(chip_of(device))
    has_kernel = pallas is not None and unsupported(pallas, pool_shape, VALUE_WIDTH, dtype, dtype) is None
    return (pallas, "bucketed") if pallas is not None and has_kernel else ("bucketed",)


def program(cell: Cell, backend: Backend, num_repeats: int) -> Callable[..., jax.Array]:
    """Return a function that attends again and again, each time with what it found and over other pages."""
    options: dict[str, Any] = {"value_width": VALUE_WIDTH, "scoring": Scoring(192**-0.5), "backend": backend}

    def attend(q: jax.Array, pages: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        pool = (pages, jnp.int32(0), table, lengths)
        if cell.queries == 1:
            return decode_attention(q, *pool, **options)
        starts = cell.queries * jnp.arange(cell.rows + 1, dtype=jnp.int32)
        return mixed_attention(q, *pool, ragged_layout(starts, jnp.int32(0), num_tokens=len(q)), **options)

    def repeat(q: jax.Array, pages: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        for index in range(num_repeats):
            values = attend(q, pages, tables[index % NUM_TABLES], lengths)
            q = jnp.concatenate([values, q[..., VALUE_WIDTH:]], -1)
        return q

    return repeat


def _measure(context: Context, cell: Cell, backend: Backend, pages: jax.Array) -> None:
    random = np.random.default_rng(context.seed)
    num_repeats = max(2, min(_MOST_REPEATS, int(REPEATED_BYTES / cell.num_bytes)))
    tables = scattered_tables(random, pages.shape[1], cell.rows, cell.context, cell.context)
    shape = (cell.rows * cell.queries, cell.num_heads, WIDTH)
    q = jnp.asarray(random.standard_normal(shape, np.float32), pages.dtype)
    arguments = (q, pages, tables, jnp.full(cell.rows, cell.context, jnp.int32))
    compiled = jax.jit(program(cell, backend, num_repeats)).lower(*arguments).compile()
    timing = time_calls(lambda: compiled(*arguments), jax.block_until_ready, budget_s=CELL_BUDGET_S).of_one(num_repeats)
    flops = 2 * cell.rows * cell.queries * cell.context * cell.num_heads * (WIDTH + VALUE_WIDTH)
    context.recorder.figure(
        "attention over latent vectors, one layer",
        heads=cell.num_heads,
        batch=cell.rows,
        context=cell.context,
        tokens=cell.queries,
        backend=backend,
        us=timing.median_s * 1e6,
        spread=timing.spread,
        gb_per_s=cell.num_bytes / timing.median_s / 1e9,
        of_copy=context.share_of_copy(cell.num_bytes, timing.median_s),
        of_matmul=context.share_of_matmul(flops, timing.median_s),
    )
