"""Recurrent ops: a text divided into steps, beside other rows or alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.linear_attention import linear_attention
from jaxserve_kernels.linear_attention.cases import Case, Operands, operands
from jaxserve_kernels.segments import CHUNK, cut_segments, decode_segments, max_chunks

CASE = Case((100,), (0,))
STEP_TOLERANCE = 3e-6
"""Largest difference between a text in one step and in several, relative to the largest number."""


@jax.jit
def _step(given: Any, states: Any, starts: Any, positions: Any) -> Any:
    q, k, v, log_decay, rate = given
    segments = cut_segments(starts, positions, jnp.int32(0), num_tokens=len(q))
    return linear_attention(q, k, v, log_decay, rate, states, segments)


def _tokens(given: Operands) -> list[np.ndarray]:
    """Return the arrays with one entry per token."""
    rate = np.ones(given.log_decay.shape, np.float32) if given.rate is None else given.rate
    return [given.q, given.k, given.v, given.log_decay, rate]


def _in_steps(given: Operands, sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    states, outs, start = given.states, [], 0
    for size in sizes:
        padded = [np.pad(x[start : start + size], ((0, 128 - size), *[(0, 0)] * (x.ndim - 1))) for x in _tokens(given)]
        out, states = _step(padded, states, np.array([0, size]), np.array([start]))
        outs.append(np.asarray(out[:size]))
        start += size
    return np.concatenate(outs), np.asarray(states)


def test_steps_that_end_at_chunk_borders_give_the_bits_of_one_step() -> None:
    given = operands(CASE)
    whole = _in_steps(given, (100,))
    parts = _in_steps(given, (CHUNK, 2 * CHUNK, 100 - 3 * CHUNK))
    assert all(map(np.array_equal, whole, parts))


def test_steps_that_end_anywhere_differ_by_rounding() -> None:
    given = operands(CASE)
    for found, wanted in zip(_in_steps(given, (7, 1, 50, 42)), _in_steps(given, (100,)), strict=True):
        assert np.abs(found - wanted).max() <= STEP_TOLERANCE * np.abs(wanted).max()


def test_a_row_gives_the_same_bits_beside_others() -> None:
    beside = operands(Case((1, 33, 40, 6), (9, 5, 70, 0), padding=5))
    num_tokens = len(beside.q)
    out, states = _step(_tokens(beside), beside.states, beside.starts, beside.positions)
    start, end = beside.starts[2:4]
    rolled = [np.roll(x, -start, axis=0) for x in _tokens(beside)]
    for x in rolled:
        x[end - start :] = np.nan
    empty = np.full_like(beside.states, np.inf)
    empty[0] = beside.states[2]
    starts = np.array([0, *[end - start] * 4])
    alone, after = _step(rolled, empty, starts, beside.positions[[2, 0, 0, 0]])
    assert alone.shape[0] == num_tokens
    assert np.array_equal(np.asarray(out)[start:end], np.asarray(alone)[: end - start])
    assert np.array_equal(np.asarray(states)[2], np.asarray(after)[0])


def test_a_token_alone_equals_a_chunk_of_one() -> None:
    given = operands(Case((1,) * 5, (3, 9, 31, 32, 64), is_decode=True))
    q, k, v, log_decay, rate = map(jnp.asarray, _tokens(given))
    segments = decode_segments(jnp.asarray(given.starts))
    single = linear_attention(q, k, v, log_decay, rate, jnp.asarray(given.states), segments)
    chunked = _step(_tokens(given), given.states, given.starts, given.positions)
    for found, wanted in zip(chunked, single, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_no_step_has_more_chunks_than_there_is_room_for() -> None:
    cut = jax.jit(partial(cut_segments, num_tokens=96))
    random = np.random.default_rng(0)
    for longest in (1, 2, 3, 4, 8, 12) * 4:
        counts, positions = random.integers(0, longest + 1, 8), random.integers(0, 100, 8)
        counts[random.integers(8)] += random.choice([0, 96 - counts.sum()])
        starts = np.concatenate(([0], np.cumsum(counts)))
        borders = [{i // CHUNK for i in range(p, p + n)} for p, n in zip(positions, counts, strict=True)]
        chunks = cut(starts, positions, 0).chunks
        assert chunks is not None
        num_chunks = sum(map(len, borders))
        assert int(chunks.num_chunks) == num_chunks <= len(chunks.rows) == max_chunks(96, 8)
        assert int(chunks.sizes[:num_chunks].sum()) == counts.sum()


def test_whole_chunks_are_those_that_a_step_has_from_their_first_token_to_their_last() -> None:
    counts, positions = [1, 70, 0, 31, 64, 33], [31, 30, 64, 33, 32, 63]
    starts = np.concatenate(([0], np.cumsum(counts)))
    whole = cut_segments(jnp.asarray(starts), jnp.asarray(positions), jnp.int32(1), num_tokens=224).whole
    assert whole is not None
    assert whole.counts.tolist() == [0, 2, 0, 0, 2, 1]
    assert whole.firsts[np.array([1, 4, 5])].tolist() == [0, 2, 4]
    # Rows 1, 4 and 5 begin at tokens 1, 102 and 166 of the step; their first borders are 2, 0 and 1 tokens later.
    assert whole.starts[:5].tolist() == [3, 35, 102, 134, 167]
    assert max(whole.starts) <= 224 - CHUNK


def test_a_step_shorter_than_a_chunk_has_no_whole_chunk() -> None:
    cut = cut_segments(jnp.asarray([0, CHUNK - 1]), jnp.asarray([0]), jnp.int32(0), num_tokens=CHUNK - 1)
    assert cut.whole is None
