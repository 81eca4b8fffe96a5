"""Conformance cases of block-sparse attention: rows, keys and values of `paged_attention`, and keys of an indexer.

Queries and keys of the indexer are small whole numbers: scores are exact in every type, and many blocks have equal ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.block_sparse_attention.api import BlockChoice, BlockKeys, IndexOperands, write_and_attend
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.paged_attention import Paging, cases, ragged_layout
from jaxserve_kernels.paged_attention.cases import LAYER, TOLERANCES
from jaxserve_kernels.rope import Rotation

_EPS = 0.25
"""Added to the mean square of a block's key."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Other fields as in `paged_attention.cases.Case`."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    choice: BlockChoice
    index_heads: int = 2
    index_dim: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 32
    page_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    padding: int = 0

    @property
    def rows(self) -> cases.Case:
        """Return the rows with their keys and values."""
        return cases.Case(
            counts=self.counts,
            lengths=self.lengths,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            dim=self.dim,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            padding=self.padding,
        )

    def __str__(self) -> str:
        rows = str(self.rows) if len(self.counts) < 9 else f"{len(self.counts)}rows"
        best = f"best{self.choice.count}of{self.choice.size}and{self.choice.num_local}"
        best += "-pooled" if self.choice.is_pooled else ""
        return f"{rows}-index{self.index_heads}x{self.index_dim}-{best}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`. The pools lack what the tokens write."""

    q: np.ndarray  # (T, N, H)
    k: np.ndarray  # (T, K, H)
    v: np.ndarray
    k_pages: np.ndarray  # (L, P, K, S, H)
    v_pages: np.ndarray
    queries: np.ndarray  # (T, J, I)
    keys: np.ndarray  # (T, I)
    key_pages: np.ndarray  # (L, P, 1, S, I)
    tables: np.ndarray  # (B, M)
    lengths: np.ndarray  # (B,)
    query_starts: np.ndarray  # (B + 1,)
    token_pages: np.ndarray  # (T,)
    token_slots: np.ndarray  # (T,)


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands of a case."""
    given, random = cases.operands(case.rows, seed), np.random.default_rng(seed + 1)
    dtype, num_tokens = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype)), len(given.q)
    k_pages, v_pages = given.k_pages, given.v_pages
    key_pages = np.where(np.isnan(k_pages[:, :, :1, :, :1].astype(np.float32)), np.nan, 400.0)
    key_pages = np.broadcast_to(key_pages, (*key_pages.shape[:-1], case.index_dim)).astype(k_pages.dtype)
    token_pages, token_slots = np.zeros((2, num_tokens), np.int32)
    keys = np.zeros((num_tokens, case.index_dim), dtype)
    k, v = np.zeros((2, num_tokens, case.num_kv_heads, case.dim), dtype)
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        for position in range(length):
            page, slot = given.tables[row, position // case.page_size], position % case.page_size
            key_pages[:, page, 0, slot] = random.integers(-2, 3, case.index_dim)
            token = given.query_starts[row] + position - (length - count)
            if position >= length - count:
                token_pages[token], token_slots[token] = page, slot
                keys[token] = key_pages[LAYER, page, 0, slot]
                k[token], v[token] = k_pages[LAYER, page, :, slot], v_pages[LAYER, page, :, slot]
                key_pages[:, page, 0, slot] = 400
                k_pages[:, page, :, slot] = v_pages[:, page, :, slot] = 400
    queries = random.integers(-2, 3, (num_tokens, case.index_heads, case.index_dim)).astype(dtype)
    rows = given.tables, given.lengths, given.query_starts, token_pages, token_slots
    return Operands(given.q, k, v, k_pages, v_pages, queries, keys, key_pages, *rows)


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T N H"]:
    """Write, choose and attend. See `ops.OpCases`."""
    own = as_arrays(given)
    starts, layer, ragged = own.query_starts, jnp.int32(LAYER), None
    if not case.rows.is_decode:
        ragged = ragged_layout(starts, jnp.int32(case.rows.num_decode_rows), num_tokens=len(given.q))
    paging = Paging(own.tables, own.lengths, starts, own.token_pages, own.token_slots, ragged)
    index = IndexOperands(own.queries, own.keys, own.key_pages, layer)
    if case.choice.is_pooled:
        angles, weight = map(jnp.asarray, _block_numbers(case))
        rotation = Rotation(jnp.cos(angles), jnp.sin(angles))
        index = index._replace(block_keys=BlockKeys(weight, jnp.float32(_EPS), rotation))
    pools = own.k_pages, own.v_pages, layer, paging, index
    return write_and_attend(
        own.q, own.k, own.v, *pools, choice=case.choice, scoring=case.rows.scoring, backend=backend
    )[0]


def _block_numbers(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the angles by which the first half of a block's key turns, and the factors on it."""
    num_blocks = -(-max(case.lengths) // case.choice.size)
    frequencies = np.linspace(0.5, 0.01, case.index_dim // 4, dtype=np.float32)
    angles = np.arange(num_blocks, dtype=np.float32)[:, None] * case.choice.size * frequencies
    return angles, np.linspace(0.5, 1.5, case.index_dim, dtype=np.float32)


def error(case: Case, given: Operands, out: object) -> float:
    """Return the largest error relative to TOLERANCES. Padding after the last row must be finite. See `ops.OpCases`."""
    wanted, found = expected(case, given), np.asarray(out, np.float64)
    difference = float(np.abs(found[: len(wanted)] - wanted).max(initial=0.0))
    return difference / TOLERANCES[case.dtype] if np.isfinite(found).all() else np.inf


def expected(case: Case, given: Operands) -> np.ndarray:
    """The answer for every token that a row has: (sum of counts, N, H)."""
    pools = [pages[LAYER].copy() for pages in (given.key_pages, given.k_pages, given.v_pages)]
    for pool, own in zip(pools, (given.keys[:, None], given.k, given.v), strict=True):
        pool[given.token_pages, :, given.token_slots] = own
    heads_of_index, group = case.num_kv_heads // case.index_heads, case.num_heads // case.num_kv_heads
    out = np.zeros((sum(case.counts), case.num_heads, case.dim))
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        if length == 0:
            continue
        keys, k, v = (
            pool[given.tables[row]].astype(np.float64).transpose(0, 2, 1, 3).reshape(-1, pool.shape[1], pool.shape[3])
            for pool in pools
        )
        for i in range(count):
            token, end = given.query_starts[row] + i, length - count + i + 1
            scores = keys[:end, 0] @ given.queries[token].astype(np.float64).T  # (end, J)
            for head in range(case.num_heads):
                kv_head = head // group
                seen = (
                    _seen_of_blocks(case, keys[:end, 0], given.queries[token].astype(np.float64))
                    if case.choice.is_pooled
                    else _seen(scores[:, kv_head // heads_of_index], case.choice)
                )
                weights = np.exp(k[seen, kv_head] @ given.q[token, head].astype(np.float64) * case.rows.scoring.scale)
                out[token, head] = weights / weights.sum() @ v[seen, kv_head]
    return out


def _seen(scores: np.ndarray, choice: BlockChoice) -> np.ndarray:
    """Return the positions that a query with these scores attends to."""
    starts = np.arange(0, len(scores), choice.size)
    best = np.maximum.reduceat(scores, starts)
    best[-choice.num_local :] = np.inf
    blocks = np.argsort(-best, kind="stable")[: choice.count]
    return np.flatnonzero(np.isin(np.arange(len(scores)) // choice.size, blocks))


def _seen_of_blocks(case: Case, keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the positions that a query attends to if whole blocks have keys. keys: of the tokens that it sees; queries: (J, I)."""
    size, (angles, weight) = case.choice.size, _block_numbers(case)
    num_whole = len(keys) // size
    means = keys[: num_whole * size].reshape(num_whole, size, keys.shape[1]).mean(1)
    made = means / np.sqrt(np.square(means).mean(1, keepdims=True) + _EPS) * weight
    turns = np.exp(1j * angles[:num_whole].astype(np.float64))
    first, second, rest = np.split(made, [angles.shape[1], 2 * angles.shape[1]], 1)
    turned = (first + 1j * second) * turns
    scores = np.maximum(np.concatenate([turned.real, turned.imag, rest], 1) @ queries.T, 0).sum(1)
    blocks = np.argsort(-scores, kind="stable")[: case.choice.count]
    own = np.arange(len(keys)) // size
    return np.flatnonzero(np.isin(own, blocks) | (own >= num_whole))


CASES = (
    Case((1, 1, 1, 1), (5, 77, 1, 0), BlockChoice(8, 2, 1)),
    Case((1, 1, 9, 70, 1, 0), (40, 1, 9, 133, 21, 0), BlockChoice(4, 3, 2), padding=3, page_size=32),
    Case((1, 4, 130), (700, 64, 200), BlockChoice(16, 4, 1), index_heads=1, num_heads=6, dtype="bfloat16"),
    Case((70, 3), (70, 25), BlockChoice(12, 2, 1), num_heads=3, num_kv_heads=1, index_heads=1, dtype="float16"),
    Case((1,) * 70, tuple(range(70)), BlockChoice(3, 4, 1)),
    Case((1, 70), (40, 150), BlockChoice(8, 2, 1), kv_dtype="float8_e4m3fn"),
    Case((1, 20), (1300, 1100), BlockChoice(128, 6, 1), num_kv_heads=4, page_size=64),
    Case((1, 1), (30, 16), BlockChoice(16, 4, 1)),
    Case((1, 1, 9, 70, 1, 0), (40, 1, 9, 133, 21, 0), BlockChoice(4, 3, 0, is_pooled=True), index_heads=3, padding=3),
    Case((1, 20), (300, 190), BlockChoice(24, 4, 0, is_pooled=True), index_heads=6, num_kv_heads=4, dtype="bfloat16"),
)
"""Rows that are long and that are not, of a token, of several and of tiles; blocks that are pages, parts of them and several of
them, and whose borders cut pages; equal scores; choices that no row is long enough for; blocks that have keys."""
SLOW = CASES[2:]
BACKENDS: tuple[Backend, ...] = ("bucketed",)
