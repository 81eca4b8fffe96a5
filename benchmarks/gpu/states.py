"""Recurrent states alone (gated delta net, Mamba-2), at the sizes of a layer: decode steps, and prompts by both forms: on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.linear_attention import PooledStates, linear_attention, takes_tokens_in_turn
from jaxserve_kernels.segments import cut_segments, decode_segments
from jaxtyping import Array, Float

from benchmarks.gpu.attention import CELL_BUDGET_S
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.timing import time_calls
from jaxserve.runner.backend import chip_of, pallas_backend

_NUM_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer."""

    name: str
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_rate: bool

    @property
    def state_bytes(self) -> int:
        return 4 * self.num_value_heads * self.key_dim * self.value_dim


QWEN = Heads("Qwen3.6-35B-A3B", 16, 32, 128, 128, has_rate=True)
GRANITE = Heads("Granite-4.0-H-Small", 1, 128, 128, 64, has_rate=False)
TINY = Heads("tiny", 1, 2, 32, 64, has_rate=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: rows of as many tokens each; of one token: a decode step."""

    heads: Heads
    rows: int
    tokens: int
    has_chunks: bool = True
    """False: tokens one after the other, as in programs of few tokens."""

    def __str__(self) -> str:
        form = "" if self.tokens == 1 else ", chunks" if self.has_chunks else ", tokens in turn"
        return f"{self.heads.name}: {self.rows} x {self.tokens}{form}"


CELLS = (
    *(Cell(heads, rows, 1) for heads in (QWEN, GRANITE) for rows in (1, 32, 256)),
    *(
        Cell(heads, rows, tokens, has_chunks)
        for heads in (QWEN, GRANITE)
        for rows, tokens in ((1, 256), (1, 512), (1, 2048), (1, 8192), (4, 2048))
        for has_chunks in (False, True)
    ),
)
QUICK = (Cell(TINY, 2, 1), Cell(TINY, 1, 64), Cell(TINY, 1, 64, has_chunks=False))


def run(context: Context) -> None:
    """Measure every cell."""
    backend = pallas_backend(chip_of(first_device(context))) or "reference"
    if not takes_tokens_in_turn(backend, QWEN.key_dim, QWEN.value_dim):
        context.recorder.note("there is no kernel for recurrent states on this device: these are XLA's")
    cells = {str(cell): partial(_measure, context, cell, backend) for cell in (QUICK if context.is_quick else CELLS)}
    context.recorder.expect(cells)
    for name, measure in cells.items():
        context.recorder.attempt(name, measure)


def program(cell: Cell, backend: Backend) -> Callable[..., tuple[Array, Array]]:
    """Return a function that computes the rows again and again, each time with what they found as values, and the states before."""
    starts = cell.tokens * jnp.arange(cell.rows + 1, dtype=jnp.int32)
    rows = jnp.arange(cell.rows, dtype=jnp.int32)

    def repeat(
        keys: Float[Array, "2 T K H"], values: Float[Array, "T N V"], gates: Float[Array, "2 T N"], pool: Array
    ) -> tuple[Array, Array]:
        if cell.tokens == 1:
            segments = decode_segments(starts)
        else:
            segments = cut_segments(starts, jnp.zeros_like(rows), jnp.int32(0), num_tokens=len(values))
            segments = segments if cell.has_chunks else segments.without_whole_chunks()
        q, k = keys
        rate = gates[1] if cell.heads.has_rate else None
        states = PooledStates(pool, 0, rows, rows)
        for _ in range(_NUM_REPEATS):
            values, after = linear_attention(q, k, values, -gates[0], rate, states, segments, backend=backend)
            assert isinstance(after, PooledStates), "a pool is returned as one"
            states = after
        return values, states.pool

    return repeat


def _measure(context: Context, cell: Cell, backend: Backend) -> None:
    heads, num_tokens = cell.heads, cell.rows * cell.tokens
    of_keys, of_values, of_gates = jax.random.split(jax.random.key(context.seed), 3)
    keys = jax.random.normal(of_keys, (2, num_tokens, heads.num_key_heads, heads.key_dim))
    arguments = (
        keys / jnp.linalg.norm(keys, axis=-1, keepdims=True),
        jax.random.normal(of_values, (num_tokens, heads.num_value_heads, heads.value_dim)),
        jax.random.uniform(of_gates, (2, num_tokens, heads.num_value_heads)),
    )
    pool = jnp.zeros((1, cell.rows, heads.num_value_heads, heads.key_dim, heads.value_dim))
    compiled = jax.jit(program(cell, backend), donate_argnums=3).lower(*arguments, pool).compile()
    pools = [pool]

    def call() -> Array:
        out: Array
        out, after = compiled(*arguments, pools.pop())
        pools.append(after)
        return out

    timing = time_calls(call, jax.block_until_ready, budget_s=CELL_BUDGET_S).of_one(_NUM_REPEATS)
    num_bytes = 2 * cell.rows * heads.state_bytes
    context.recorder.figure(
        "recurrent states, one layer",
        heads=heads.name,
        rows=cell.rows,
        tokens=cell.tokens,
        form="decode" if cell.tokens == 1 else "chunks" if cell.has_chunks else "tokens in turn",
        backend=backend,
        us=timing.median_s * 1e6,
        spread=timing.spread,
        us_per_token=timing.median_s * 1e6 / cell.tokens,
        gb_per_s=num_bytes / timing.median_s / 1e9,
        of_copy=context.share_of_copy(num_bytes, timing.median_s),
    )
