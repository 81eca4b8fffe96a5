"""Attention alone, as programs over the pool of one layer: repeated, so that a call is long enough to be timed.

Every repetition waits for the one before it, and reads other pages, so that nothing stays in a cache that a model
would find cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.paged_attention import Scoring, decode_attention, mixed_attention, ragged_layout

from benchmarks.gpu.ahead import Wanted
from benchmarks.gpu.rig import BLOCK_SIZE

NUM_TABLES = 4
"""Different page tables that repetitions take in turns."""
MOST_REPEATS = 32
TYPICAL_TOKENS = 4096
REPEATED_TOKENS = 16384
"""Tokens that a call of prefill attention has about."""
REPEATED_BYTES = 8e9
"""Bytes that a call reads about, with rows of TYPICAL_TOKENS: the device's work has to cover the dispatch."""

Attend = Callable[..., jax.Array]
"""q, k_pages, v_pages, layer, block_tables, kv_lengths."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one layer, and the dtypes of its queries and its pool."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.dim**-0.5)

    def pool(self, num_tokens: int) -> tuple[int, ...]:
        """Shape of the keys of that many tokens; the first page is the null page."""
        return (1, -(-num_tokens // BLOCK_SIZE) + 1, self.num_kv_heads, BLOCK_SIZE, self.dim)

    def decode_bytes(self, batch: int, length: int) -> int:
        """Keys and values that a step has to read."""
        return 2 * batch * length * self.num_kv_heads * self.dim * self.kv_dtype.itemsize

    def prefill_flops(self, length: int, prefix: int = 0) -> int:
        """Return the operations of two matmuls: over half a square, and over the keys of a prefix."""
        return 2 * self.num_heads * self.dim * length * (length + 1 + 2 * prefix)

    @staticmethod
    def num_prefill_repeats(num_tokens: int) -> int:
        """Return the repetitions of prefill attention in one program."""
        return max(1, min(MOST_REPEATS, REPEATED_TOKENS // num_tokens))

    def num_repeats(self, batch: int) -> int:
        """Return the repetitions of decode attention in one program."""
        return max(2, min(MOST_REPEATS, int(REPEATED_BYTES / self.decode_bytes(batch, TYPICAL_TOKENS))))


def decode_program(
    heads: Heads, attend: Attend, batch: int, num_pages: int, longest: int, *, num_repeats: int
) -> Wanted:
    """Return a program for `batch` rows of up to `longest` tokens, for every length.

    Repetitions are a straight line: the host would wait for the condition of a loop in each of them.
    """

    def repeat(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        for index in range(num_repeats):
            q = attend(q, k, v, jnp.int32(0), tables[index % NUM_TABLES], lengths)
        return q

    table = (NUM_TABLES, batch, -(-longest // BLOCK_SIZE))
    return Wanted(repeat, (*_operands(heads, batch, num_pages), _int32(*table), _int32(batch)))


def prefill_program(
    heads: Heads,
    attend: Attend,
    length: int,
    num_pages: int,
    backend: Backend,
    *,
    num_rows: int = 1,
    prefix: int = 0,
    num_repeats: int = 1,
) -> Wanted:
    """Return a program for `num_rows` segments of `length` tokens, each after `prefix` cached ones, in one causal pass.

    `attend` takes the layout of the step as well, which is made once for all repetitions, as for all layers of a model.
    """

    def repeat(q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array) -> jax.Array:
        starts = jnp.arange(num_rows + 1, dtype=jnp.int32) * length
        lengths = jnp.full(num_rows, prefix + length, jnp.int32)
        ragged = ragged_layout(starts, jnp.int32(0), num_tokens=num_rows * length, backend=backend)
        for _ in range(num_repeats):
            q = attend(q, k, v, jnp.int32(0), tables, lengths, ragged)
        return q

    tables = _int32(num_rows, -(-(prefix + length) // BLOCK_SIZE))
    return Wanted(repeat, (*_operands(heads, num_rows * length, num_pages), tables))


def public_decode(heads: Heads, backend: Backend) -> Attend:
    """`api.decode_attention` of one backend."""

    return partial(decode_attention, scoring=heads.scoring, backend=backend)


def public_prefill(heads: Heads, backend: Backend) -> Attend:
    """`api.mixed_attention` of one backend."""

    return partial(mixed_attention, scoring=heads.scoring, backend=backend)


def scattered_tables(
    random: np.random.Generator, num_pages: int, batch: int, length: int, longest: int, num_tables: int = NUM_TABLES
) -> jax.Array:
    """Pages for every row, `num_tables` times; different ones where the pool has enough."""
    used, width = -(-length // BLOCK_SIZE), -(-longest // BLOCK_SIZE)
    order = random.permutation(num_pages - 1) + 1
    tables = np.zeros((num_tables, batch, width), np.int32)
    for index in range(num_tables):
        places = index * batch * used + np.arange(batch * used)
        tables[index, :, :used] = order[places % len(order)].reshape(batch, used)
    return jnp.asarray(tables)


def queries(random: np.random.Generator, heads: Heads, count: int) -> jax.Array:
    return jnp.asarray(random.standard_normal((count, heads.num_heads, heads.dim), np.float32), heads.dtype)


def _operands(heads: Heads, num_tokens: int, num_pages: int) -> Sequence[jax.ShapeDtypeStruct]:
    pool = jax.ShapeDtypeStruct((1, num_pages, heads.num_kv_heads, BLOCK_SIZE, heads.dim), heads.kv_dtype)
    return (jax.ShapeDtypeStruct((num_tokens, heads.num_heads, heads.dim), heads.dtype), pool, pool)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
