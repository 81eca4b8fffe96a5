"""Places of the largest scores of each query, in the order of the keys: the C-th largest score, then all above it and ties.

Scores are integers above 0, in an order that `ordered` gives them; 0 stands for a key that a query does not see. XLA would sort all of
them, and on CPUs compare them one by one.

- `in_loops` finds the score bit by bit, in loops that go as far as the keys of the tile do: texts pay for what they have.
- `in_buckets` finds four bits at a time, for GPUs: of a loop whose rounds depend on data the host reads the condition before each of
  them, some 100 times here. The keys that a tile may have come in buckets, one branch each, whose loops have a fixed number of rounds.

Letters: G rows of a tile, Q queries of each of them, K keys, C keys that are chosen.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

SHORTEST = 8192
"""Keys of the smallest bucket."""
_GROWTH = 4
"""The next bucket has as many times the keys: a bucket more takes the compiler longer than its keys take the device."""
_BITS, _DIGIT = 32, 4
"""Bits of a score, and those that one pass over the scores finds."""


def ordered(scores: Float[Array, "*s"]) -> UInt32[Array, "*s"]:
    """Return integers above 0 that are ordered as the float32 numbers are; 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    return jnp.maximum(jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31)), 1)


def in_loops(
    ranks: UInt32[Array, "G Q K"], num_blocks: Int[Array, ""], num_counted: int, count: int
) -> Int[Array, "G Q C"]:
    """Choose up to `count` keys of the first `num_blocks` blocks of `num_counted` keys; zeros after the last one."""

    def num_where(compare: str, than: UInt32[Array, "G Q"]) -> Int[Array, "G Q"]:
        def add(block: Array, total: Int[Array, "G Q"]) -> Int[Array, "G Q"]:
            own = jax.lax.dynamic_slice_in_dim(ranks, block * num_counted, num_counted, 2)
            is_counted = own >= than[..., None] if compare == ">=" else own > than[..., None]
            return total + is_counted.sum(-1, dtype=jnp.int32)

        total: Array = jax.lax.fori_loop(0, num_blocks, add, jnp.zeros(than.shape, jnp.int32))
        return total

    def set_bit(index: Array, found: UInt32[Array, "G Q"]) -> UInt32[Array, "G Q"]:
        higher = found | (jnp.uint32(1) << (_BITS - 1 - index).astype(jnp.uint32))
        return jnp.where(num_where(">=", higher) >= count, higher, found)

    none = jnp.zeros(ranks.shape[:2], jnp.uint32)
    smallest = jax.lax.fori_loop(0, jnp.where(num_blocks > 0, _BITS, 0), set_bit, none)
    num_equal = count - num_where(">", smallest)  # that are chosen of those with the smallest score
    return _places(ranks, smallest, num_equal, num_blocks, num_counted, count)


def in_buckets(
    ranks: UInt32[Array, "G Q K"], ends: Int[Array, "G Q"], num_counted: int, count: int, shortest: int = SHORTEST
) -> Int[Array, "G Q C"]:
    """Choose up to `count` keys before `ends` for each query; zeros after the last one. What `ranks` has after them does not count.

    num_counted: scores of each query that temporary arrays may hold; it divides K or is larger.
    """
    sizes = bucket_sizes(ranks.shape[2], num_counted, shortest)
    bucket = sum((ends.max() > size).astype(jnp.int32) for size in sizes[:-1])
    branches = [functools.partial(_in_line, size, min(size, num_counted), count) for size in sizes]
    chosen: Array = jax.lax.switch(jnp.asarray(bucket, jnp.int32), branches, ranks, ends)
    return chosen


def bucket_sizes(num_keys: int, num_counted: int, shortest: int) -> list[int]:
    """Return the keys of each bucket, whole blocks of `num_counted` keys if there are more, up to `num_keys`."""
    sizes, size = list[int](), shortest
    while size < num_keys:
        sizes.append(size)
        unit = num_counted if _GROWTH * size > num_counted else 1
        size = -(-_GROWTH * size // unit) * unit
    return [*sizes, num_keys]


def _in_line(
    num_keys: int, num_counted: int, count: int, ranks: UInt32[Array, "G Q K"], ends: Int[Array, "G Q"]
) -> Int[Array, "G Q C"]:
    """Choose among the first `num_keys` keys."""
    own = jnp.where(jnp.arange(num_keys) < ends[..., None], ranks[..., :num_keys], jnp.uint32(0))
    digits = jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)

    def set_digit(index: Array, found: UInt32[Array, "G Q"]) -> UInt32[Array, "G Q"]:
        shift = (_BITS - _DIGIT * (1 + index)).astype(jnp.uint32)
        higher = found[..., None] | digits << shift  # (G, Q, 15)
        counts = (own[..., None, :] >= higher[..., None]).sum(-1, dtype=jnp.int32)
        # The digit is as large as the number of digits that leave enough scores.
        return found | (counts >= count).sum(-1, dtype=jnp.uint32) << shift

    found = jax.lax.fori_loop(0, _BITS // _DIGIT, set_digit, jnp.zeros(ends.shape, jnp.uint32))
    num_equal = count - (own > found[..., None]).sum(-1, dtype=jnp.int32)
    return _places(own, found, num_equal, num_keys // num_counted, num_counted, count)


def _places(
    ranks: UInt32[Array, "G Q K"],
    smallest: UInt32[Array, "G Q"],
    num_equal: Int[Array, "G Q"],
    num_blocks: int | Int[Array, ""],
    num_counted: int,
    count: int,
) -> Int[Array, "G Q C"]:
    """Return the places of all scores above the smallest one, and of the first `num_equal` that equal it, in their order."""
    rows, queries = (jnp.arange(size) for size in smallest.shape)
    own = functools.partial(jnp.expand_dims, axis=-1)

    def gather(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        chosen, num_found, num_ties = state
        ranks_of_block = jax.lax.dynamic_slice_in_dim(ranks, block * num_counted, num_counted, 2)
        is_tie = (ranks_of_block == own(smallest)) & (ranks_of_block > 0)  # 0: not visible
        ties = own(num_ties) + jnp.cumsum(is_tie, -1, dtype=jnp.int32)
        is_chosen = (ranks_of_block > own(smallest)) | (is_tie & (ties <= own(num_equal)))
        places = own(num_found) + jnp.cumsum(is_chosen, -1, dtype=jnp.int32)
        beyond = count + jnp.arange(num_counted)  # dropped, each at a place of its own
        chosen = chosen.at[rows[:, None, None], queries[:, None], jnp.where(is_chosen, places - 1, beyond)].set(
            block * num_counted + jnp.arange(num_counted), mode="drop", unique_indices=True
        )
        return chosen, places[..., -1], ties[..., -1]

    none = jnp.zeros(smallest.shape, jnp.int32)
    start = jnp.zeros((*smallest.shape, count), jnp.int32), none, none
    chosen: Array = jax.lax.fori_loop(0, num_blocks, gather, start)[0]
    return chosen
