"""Conformance cases of sparse attention: rows and latent vectors of `latent_attention`, and keys of an indexer.

Queries, weights and keys of the indexer are small whole numbers: scores are exact in every type, and many are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.latent_attention import cases
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.paged_attention import Paging, ragged_layout
from jaxserve_kernels.paged_attention.cases import LAYER, TOLERANCES
from jaxserve_kernels.sparse_attention.api import IndexQueries, write_and_attend, write_and_choose


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Other fields as in `latent_attention.cases.Case`."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_chosen: int
    index_heads: int = 4
    index_dim: int = 16
    num_heads: int = 3
    width: int = 56
    value_width: int = 40
    page_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    padding: int = 0
    pool_size: int = 1
    """Tokens of a key; `num_chosen` counts those of whole pools and this number - 1 more."""
    has_sinks: bool = False
    seed: int = 0

    @property
    def sinks(self) -> np.ndarray | None:
        """Return a logit of each head that takes its share; None without."""
        return np.linspace(-1, 2, self.num_heads, dtype=np.float32) if self.has_sinks else None

    @property
    def rows(self) -> cases.Case:
        """Return the rows and their latent vectors."""
        return cases.Case(
            counts=self.counts,
            lengths=self.lengths,
            num_heads=self.num_heads,
            width=self.width,
            value_width=self.value_width,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            padding=self.padding,
        )

    def __str__(self) -> str:
        rows = str(self.rows) if len(self.counts) < 9 else f"{len(self.counts)}rows"
        pools = f"-pools{self.pool_size}" if self.pool_size > 1 else ""
        return f"{rows}-index{self.index_heads}x{self.index_dim}-best{self.num_chosen}{pools}{'-sinks' if self.has_sinks else ''}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`. The pools lack what the tokens write."""

    queries: np.ndarray  # (T, J, I)
    weights: np.ndarray  # (T, J)
    keys: np.ndarray  # (T, I)
    key_pages: np.ndarray  # (L, P, 1, S, I)
    q: np.ndarray  # (T, N, W)
    latents: np.ndarray  # (T, 1, W)
    pages: np.ndarray  # (L, P, 1, S, W)
    tables: np.ndarray  # (B, M)
    lengths: np.ndarray  # (B,)
    query_starts: np.ndarray  # (B + 1,)
    token_pages: np.ndarray  # (T,)
    token_slots: np.ndarray  # (T,)
    pool_bias: np.ndarray | None  # (Z, I)


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands of a case."""
    given, random = cases.operands(case.rows, seed), np.random.default_rng(seed + 1)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    num_tokens, pages = len(given.q), given.pages
    key_pages = np.where(np.isnan(pages[..., :1].astype(np.float32)), np.nan, 400.0)
    width = case.index_dim * (2 if case.pool_size > 1 else 1)
    key_pages = np.broadcast_to(key_pages, (*pages.shape[:-1], width)).astype(pages.dtype)
    token_pages, token_slots = np.zeros((2, num_tokens), np.int32)
    keys = np.zeros((num_tokens, width), dtype)
    latents = np.zeros((num_tokens, 1, case.width), dtype)
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        for position in range(length):
            page, slot = given.tables[row, position // case.page_size], position % case.page_size
            key_pages[:, page, 0, slot] = random.integers(-2, 3, width)
            token = given.query_starts[row] + position - (length - count)
            if position >= length - count:
                token_pages[token], token_slots[token] = page, slot
                keys[token], latents[token] = key_pages[LAYER, page, 0, slot], pages[LAYER, page, :, slot]
                key_pages[:, page, 0, slot] = pages[:, page, :, slot] = 400
    return Operands(
        random.integers(-2, 3, (num_tokens, case.index_heads, case.index_dim)).astype(dtype),
        random.integers(-1, 2, (num_tokens, case.index_heads)).astype(np.float32),
        keys,
        key_pages,
        given.q,
        latents,
        pages,
        given.tables,
        given.lengths,
        given.query_starts,
        token_pages,
        token_slots,
        random.standard_normal((case.pool_size, case.index_dim)).astype(np.float32) if case.pool_size > 1 else None,
    )


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T N V"]:
    """Write, choose and attend. See `ops.OpCases`."""
    own = as_arrays(given)
    starts = own.query_starts
    ragged = None
    if not case.rows.rows.is_decode:
        ragged = ragged_layout(starts, jnp.int32(case.rows.rows.num_decode_rows), num_tokens=len(given.q))
    paging = Paging(own.tables, own.lengths, starts, own.token_pages, own.token_slots, ragged)
    index = IndexQueries(own.queries, own.weights, own.pool_bias)
    layer = jnp.int32(LAYER)
    chosen, _ = write_and_choose(
        index, own.keys, own.key_pages, layer, paging, num_chosen=case.num_chosen, backend=backend
    )
    return write_and_attend(
        own.q,
        own.latents,
        own.pages,
        layer,
        paging,
        chosen,
        num_chosen=case.num_chosen,
        pool_size=case.pool_size,
        value_width=case.value_width,
        scoring=case.rows.scoring,
        sinks=None if case.sinks is None else jnp.asarray(case.sinks),
        backend=backend,
    )[0]


def error(case: Case, given: Operands, out: object) -> float:
    """Return the largest error relative to TOLERANCES. Padding after the last row must be finite. See `ops.OpCases`."""
    wanted, found = expected(case, given), np.asarray(out, np.float64)
    difference = float(np.abs(found[: len(wanted)] - wanted).max(initial=0.0))
    return difference / TOLERANCES[case.dtype] if np.isfinite(found).all() else np.inf


def expected(case: Case, given: Operands) -> np.ndarray:
    """The answer for every token that a row has: (sum of counts, N, V)."""
    keys, vectors = given.key_pages[LAYER].copy(), given.pages[LAYER].copy()
    keys[given.token_pages, 0, given.token_slots] = given.keys
    vectors[given.token_pages, 0, given.token_slots] = given.latents[:, 0]
    out = np.zeros((sum(case.counts), case.num_heads, case.value_width))
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        own_keys, own = (
            pages[given.tables[row]].astype(np.float64).reshape(-1, pages.shape[-1])[:length]
            for pages in (keys, vectors)
        )
        for i in range(count if length else 0):
            token, end = given.query_starts[row] + i, length - count + i + 1
            whole = end - end % case.pool_size
            seen = _pooled(own_keys[:whole], given.pool_bias)
            scores = np.maximum(seen @ given.queries[token].astype(np.float64).T, 0) @ given.weights[token]
            keys_chosen = np.argsort(-scores, kind="stable")[: (case.num_chosen + 1 - case.pool_size) // case.pool_size]
            tokens = keys_chosen[:, None] * case.pool_size + np.arange(case.pool_size)
            best = np.concatenate([tokens.ravel(), np.arange(whole, end)])
            found = np.exp((own[best] @ given.q[token].astype(np.float64).T) * case.rows.scoring.scale)  # (C, N)
            total = found.sum(0) + (0 if case.sinks is None else np.exp(case.sinks.astype(np.float64)))
            out[token] = ((found / total).T @ own[best])[:, : case.value_width]
    return out


def _pooled(stored: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return the keys of pools from those of their tokens, which have gates after them."""
    if bias is None:
        return stored
    keys, gates = np.split(stored.reshape(-1, len(bias), stored.shape[-1]), 2, -1)
    shares = np.exp(gates + bias)
    found: np.ndarray = (shares / shares.sum(1, keepdims=True) * keys).sum(1)
    return found


CASES = (
    Case((1, 1, 1, 1), (5, 77, 1, 0), 8),
    Case((1, 1, 9, 70, 1, 0), (40, 1, 9, 133, 21, 0), 8, padding=3, num_heads=5, page_size=32, has_sinks=True),
    Case((1, 4, 130), (700, 64, 200), 64, index_heads=8, index_dim=40, dtype="bfloat16"),
    Case((70, 3), (70, 9), 9, dtype="float16"),
    Case((1,) * 70, tuple(range(70)), 12),
    Case((1, 70), (40, 150), 16, kv_dtype="float8_e4m3fn"),
    Case((1, 20), (1300, 1100), 600, page_size=64),
    Case((1, 1), (30, 16), 64),
    Case((1, 1, 70, 4), (90, 11, 150, 12), 11, pool_size=4, padding=2),
    Case((1, 20), (77, 60), 26, pool_size=3),
)
"""Rows that are long and that are not, of a token, of several and of tiles; as many tokens as are chosen, and one more;
equal scores; keys of pools, which cut pages; rows that fill several tiles and blocks; choices that no row is long enough for."""
SLOW = CASES[2:]
BACKENDS: tuple[Backend, ...] = ("bucketed",)
