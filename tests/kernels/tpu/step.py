"""One step of some rows over a paged pool, and what a softmax in float64 makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.paged_attention import Paging, ragged_layout

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Step:
    """Rows `(queries, keys)`; in a decode step each has one query, or none and no keys. Slots that nobody sees hold NaN."""

    rows: tuple[tuple[int, int], ...]
    num_tokens: int | None = None
    """None: a decode step. Else the length of the flat axis."""
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    max_pages: int = 8
    dtype: str = "bfloat16"
    sliding_window: int | None = None
    softcap: float | None = None
    pool_dim: int = field(default=128, kw_only=True)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([keys for _, keys in self.rows], np.int32)

    @property
    def starts(self) -> np.ndarray:
        counts = [1] * len(self.rows) if self.num_tokens is None else [queries for queries, _ in self.rows]
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

    @property
    def tokens(self) -> int:
        return len(self.rows) if self.num_tokens is None else self.num_tokens

    @property
    def num_decode_rows(self) -> int:
        """The leading rows with one query."""
        return next((i for i, (queries, _) in enumerate(self.rows) if queries != 1), len(self.rows))


@dataclass(frozen=True)
class Arrays:
    """What goes into a step, and the pools that have to come out of it."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pools: tuple[np.ndarray, np.ndarray]
    written: tuple[np.ndarray, np.ndarray]
    tables: np.ndarray
    pages: np.ndarray
    slots: np.ndarray

    def paging(self, step: Step) -> Paging:
        starts, ragged = jnp.asarray(step.starts), None
        if step.num_tokens is not None:
            ragged = ragged_layout(starts, jnp.int32(step.num_decode_rows), num_tokens=step.num_tokens)
        index = (jnp.asarray(x) for x in (self.tables, step.lengths))
        return Paging(*index, starts, jnp.asarray(self.pages), jnp.asarray(self.slots), ragged)


def make_arrays(step: Step) -> Arrays:
    """Random contents; only slots that hold a key some query sees are real."""
    rng = np.random.default_rng(0)
    dtype, size = jnp.dtype(step.dtype), step.page_size
    counts = -(-step.lengths // size)
    num_pages = int(counts.sum()) + 3
    tables = np.zeros((len(step.rows), step.max_pages), np.int32)
    ids = iter(np.arange(num_pages)[:0:-1])  # the last page of the pool is some row's first
    for row, count in enumerate(counts):
        tables[row, :count] = [next(ids) for _ in range(count)]

    def draw(*shape: int) -> np.ndarray:
        drawn = rng.normal(size=shape) * (30 if dtype == jnp.int8 else 1)
        return np.asarray(drawn.astype(np.float32)).astype(dtype)

    def widen(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((*x.shape[:-1], step.pool_dim - step.head_dim), dtype)], -1)

    shape = (LAYERS, num_pages, step.kv_heads, size, step.head_dim)
    k, v = draw(2, step.tokens, step.kv_heads, step.head_dim)
    pools = tuple(widen(draw(*shape)) for _ in range(2))
    is_used = np.zeros((num_pages, size), bool)
    for row, (queries, length) in enumerate(step.rows):
        oldest = 0 if step.sliding_window is None else max(0, length - queries - step.sliding_window + 1)
        positions = np.arange(oldest, length)
        is_used[tables[row, positions // size], positions % size] = True
    for pool in pools:
        pool.swapaxes(2, 3)[:, ~is_used] = 127 if dtype == jnp.int8 else np.nan

    pages, slots = np.zeros((2, step.tokens), np.int32)
    written = tuple(pool.copy() for pool in pools)
    for row, length in enumerate(step.lengths):
        tokens = np.arange(step.starts[row], step.starts[row + 1]) if length else np.arange(0)
        positions = length - len(tokens) + np.arange(len(tokens))
        pages[tokens], slots[tokens] = tables[row, positions // size], positions % size
        for pool, new in zip(written, (k, v), strict=True):
            pool[LAYER, pages[tokens], :, slots[tokens]] = widen(new[tokens])
    scale = step.head_dim**-0.5 / (30 if dtype == jnp.int8 else 1)
    query_type = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    heads = step.kv_heads * step.group
    q = (rng.normal(size=(step.tokens, heads, step.head_dim)).astype(np.float32) * 3 * scale).astype(query_type)
    return Arrays(q, k, v, pools, written, tables, pages, slots)


def expected(step: Step, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Attention [T, N, H] and the logarithm of the softmax's sum [T, N] of every token; tokens of no row get zeros."""
    out = np.zeros(arrays.q.shape)
    log_sum = np.full(arrays.q.shape[:2], -np.inf)
    for row, length in enumerate(step.lengths):
        positions = np.arange(length)
        pages, slots = arrays.tables[row, positions // step.page_size], positions % step.page_size
        keys, values = (
            pool[LAYER, pages, :, slots][..., : step.head_dim].astype(np.float64) for pool in arrays.written
        )  # (X, K, H)
        first, end = step.starts[row], step.starts[row + 1]
        for token in range(first, end if length else first):
            last = length - (end - token)
            start = 0 if step.sliding_window is None else max(0, last - step.sliding_window + 1)
            grouped = arrays.q[token].astype(np.float64).reshape(step.kv_heads, step.group, -1)
            scores = np.einsum("kgh,xkh->kgx", grouped, keys[start : last + 1])
            if step.softcap is not None:
                scores = step.softcap * np.tanh(scores / step.softcap)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            log_sum[token] = (np.log(weights.sum(-1)) + scores.max(-1)).reshape(-1)
            attended = np.einsum("kgx,xkh->kgh", weights / weights.sum(-1, keepdims=True), values[start : last + 1])
            out[token] = attended.reshape(out.shape[1:])
    return out, log_sum
