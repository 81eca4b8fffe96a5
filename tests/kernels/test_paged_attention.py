"""Paged attention against a dense numpy softmax, on ragged, empty, one-token and window cases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.paged_attention import Scoring, decode_attention, mixed_attention, ragged_layout

pytestmark = pytest.mark.slow

L, P, K, S, H, N = 2, 60, 2, 4, 8, 6
LAYER = 1
SCALE = 0.3

_decode = jax.jit(decode_attention, static_argnames=("scoring",))
_mixed = jax.jit(mixed_attention, static_argnames=("scoring",))


def _pool(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, L, P, K, S, H)).astype(np.float32)
    k[:, 0] = v[:, 0] = 7e3  # the null page holds rubbish that must never be seen
    return k, v


def _tables(rows: int, pages: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).permutation(P - 1)[: rows * pages].reshape(rows, pages).astype(np.int32) + 1


def _dense(
    q: np.ndarray,
    pool: tuple[np.ndarray, np.ndarray],
    table: np.ndarray,
    position: int,
    window: int | None,
    *,
    is_chunked: bool = False,
    end: int | None = None,
) -> np.ndarray:
    """One query [N, H] over the keys at positions < end; None: those at positions <= position."""
    end = position + 1 if end is None else end
    keys, values = (pages[LAYER][table].transpose(0, 2, 1, 3).reshape(-1, K, H) for pages in pool)
    first = 0 if window is None else max(0, position - window + 1)
    if window is not None and is_chunked:
        first = position - position % window
    keys, values = keys[first:end], values[first:end]
    scores = np.einsum("kgh,xkh->kgx", q.reshape(K, N // K, H) * SCALE, keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("kgx,xkh->kgh", weights, values).reshape(N, H)


@pytest.mark.parametrize(
    "window", [None, 5, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 16, 100))]
)
@pytest.mark.parametrize("pages_per_row", [1, 7, 9])
def test_decode_equals_dense_softmax(window: int | None, pages_per_row: int) -> None:
    most = pages_per_row * S
    lengths = np.array([most, 1, 0, most - 1, max(1, most // 2), min(S, most)], np.int32)
    pool, tables = _pool(), _tables(len(lengths), pages_per_row)
    q = np.random.default_rng(2).normal(size=(len(lengths), N, H)).astype(np.float32)
    out = _decode(*map(jnp.asarray, (q, *pool, LAYER, tables, lengths)), scoring=Scoring(SCALE, sliding_window=window))
    for row, length in enumerate(lengths):
        expected = _dense(q[row], pool, tables[row], length - 1, window) if length else np.zeros((N, H))
        np.testing.assert_allclose(out[row], expected, atol=1e-5, err_msg=f"row {row}, length {length}")


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_decode_in_chunks_equals_dense_softmax(chunk: int) -> None:
    lengths = np.array(
        [36, 1, 0, 17, 16, 5, 6], np.int32
    )  # the last of a chunk and the first of the next, among others
    pool, tables = _pool(), _tables(len(lengths), 8)
    tables = np.concatenate([tables, tables[:, :1]], axis=1)
    q = np.random.default_rng(2).normal(size=(len(lengths), N, H)).astype(np.float32)
    scoring = Scoring(SCALE, sliding_window=chunk, is_chunked=True)
    out = _decode(*map(jnp.asarray, (q, *pool, LAYER, tables, lengths)), scoring=scoring)
    for row, length in enumerate(lengths):
        expected = np.zeros((N, H))
        if length:
            expected = _dense(q[row], pool, tables[row], length - 1, chunk, is_chunked=True)
        np.testing.assert_allclose(out[row], expected, atol=1e-5, err_msg=f"row {row}, length {length}")


MIXED = pytest.mark.parametrize(
    ("counts", "lengths"),
    [
        ([1, 1, 5, 9], [12, 1, 5, 30]),
        ([1], [36]),
        ([130], [150]),  # three tiles
        ([64, 65], [64, 90]),  # exactly a tile, and one more than a tile
        ([7, 1, 8], [20, 9, 8]),  # a one-token chunk after a longer one is not a decode row
        ([1, 1, 1], [4, 5, 3]),
        ([], []),
    ],
)


@pytest.mark.parametrize("window", [None, 3, 11, 90])
@MIXED
def test_mixed_equals_dense_softmax(counts: list[int], lengths: list[int], window: int | None) -> None:
    _compare_mixed(counts, lengths, window)


@pytest.mark.parametrize("chunk", [3, 70])
@MIXED
def test_mixed_in_chunks_equals_dense_softmax(counts: list[int], lengths: list[int], chunk: int) -> None:
    _compare_mixed(counts, lengths, chunk, is_chunked=True)


@pytest.mark.parametrize("window", [None, 3, 90])
@MIXED
def test_tokens_of_an_image_see_it_whole(counts: list[int], lengths: list[int], window: int | None) -> None:
    _compare_mixed(counts, lengths, window, image_size=70)


def _compare_mixed(
    counts: list[int],
    lengths: list[int],
    window: int | None,
    *,
    is_chunked: bool = False,
    image_size: int | None = None,
) -> None:
    """image_size: every row's tokens are images of so many tokens, of which a step has the last ones; None: they are text."""
    rows, tokens, pages = 5, 140, 40  # more rows and tokens than any case has: the rest is padding
    pool = _pool()
    tables = np.random.default_rng(1).integers(1, P, (rows, pages)).astype(np.int32)  # shared pages are fine to read
    starts = np.full(rows + 1, sum(counts), np.int32)
    starts[: len(counts) + 1] = np.concatenate(([0], np.cumsum(counts)))
    kv_lengths = np.zeros(rows, np.int32)
    kv_lengths[: len(lengths)] = lengths
    num_decode = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    q = np.random.default_rng(3).normal(size=(tokens, N, H)).astype(np.float32)
    ragged = ragged_layout(jnp.asarray(starts), jnp.int32(num_decode), num_tokens=tokens)
    scoring = Scoring(SCALE, sliding_window=window, is_chunked=is_chunked)
    ends = np.zeros(tokens, np.int32)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        own = np.arange(length - count, length)
        ends[starts[row] : starts[row + 1]] = own + 1 if image_size is None else _image_ends(own, length, image_size)
    seen = None if image_size is None else jnp.asarray(ends)
    out = _mixed(*map(jnp.asarray, (q, *pool, LAYER, tables, kv_lengths)), ragged, scoring=scoring, key_ends=seen)
    assert np.isfinite(out).all()
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for i in range(count):
            token = starts[row] + i
            place = tables[row], length - count + i, window
            expected = _dense(q[token], pool, *place, is_chunked=is_chunked, end=int(ends[token]))
            np.testing.assert_allclose(out[token], expected, atol=1e-5, err_msg=f"row {row}, query {i}")


def _image_ends(positions: np.ndarray, length: int, size: int) -> np.ndarray:
    """Return where the image of each position ends; the last one of a row is short."""
    return np.minimum((positions // size + 1) * size, length)


def test_kv_write_changes_the_named_slots_and_nothing_else() -> None:
    k, v = _pool()
    rng = np.random.default_rng(5)
    new_k, new_v = rng.normal(size=(2, 3, K, H)).astype(np.float32)
    pages, slots = np.array([7, 7, 12], np.int32), np.array([0, 3, 1], np.int32)
    out_k, out_v = kv_write(
        jnp.asarray(k), jnp.asarray(v), jnp.int32(LAYER), *map(jnp.asarray, (new_k, new_v, pages, slots))
    )
    for i, (page, slot) in enumerate(zip(pages, slots, strict=True)):
        k[LAYER, page, :, slot], v[LAYER, page, :, slot] = new_k[i], new_v[i]
    np.testing.assert_array_equal(out_k, k)
    np.testing.assert_array_equal(out_v, v)


def test_kv_write_is_in_place_under_donation() -> None:
    k, v = (jnp.asarray(pages) for pages in _pool())
    new = jnp.ones((3, K, H))
    index = jnp.arange(3)
    compiled = jax.jit(kv_write, donate_argnums=(0, 1)).lower(k, v, jnp.int32(0), new, new, index, index).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == k.nbytes + v.nbytes
    assert memory.temp_size_in_bytes < k.nbytes / L
