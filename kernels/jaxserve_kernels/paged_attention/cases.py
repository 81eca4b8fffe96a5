"""Conformance cases of paged attention, with operands and the dense answer.

Operands are made by numpy from a seed. Pages that no row owns hold NaN; unwritten slots of a row's last page hold huge
numbers, and so does the null page. Answers are dense softmaxes in float64 over the very numbers that the operands hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.paged_attention.api import decode_attention, mixed_attention, ragged_layout
from jaxserve_kernels.paged_attention.options import Scoring

LAYER, NUM_LAYERS = 1, 2
_SPARE_PAGES = 5
TOLERANCES = {"float32": 3e-5, "float16": 6e-3, "bfloat16": 2.5e-2}
"""Largest absolute error of a result, which is an average of numbers around 1."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Row b has `counts[b]` queries, the last ones of its `lengths[b]` tokens; a padding row has length 0."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    """Factor of scores; None: the usual one for the head dimension."""
    has_sinks: bool = False
    padding: int = 0
    """Tokens after the last row."""
    num_pages: int | None = None
    """Pages of the pool; None: a few more than the rows own. The rows own the last ones."""

    @property
    def is_decode(self) -> bool:
        return max(self.counts) <= 1 and not self.padding

    @property
    def scoring(self) -> Scoring:
        scale = self.dim**-0.5 if self.scale is None else self.scale
        return Scoring(scale, self.softcap, self.sliding_window)

    @property
    def num_decode_rows(self) -> int:
        more = [row for row, count in enumerate(self.counts) if count != 1]
        return more[0] if more else len(self.counts)

    @property
    def query_starts(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.counts))).astype(np.int32)

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "mixed"
        parts = [kind, f"{self.num_heads}/{self.num_kv_heads}x{self.dim}", f"page{self.page_size}", self.dtype]
        parts += [f"kv-{self.kv_dtype}"] if self.kv_dtype else []
        parts += [f"window{self.sliding_window}"] if self.sliding_window else []
        parts += [f"cap{self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.has_sinks else []
        rows = (f"{count}of{length}" for count, length in zip(self.counts, self.lengths, strict=True))
        return "-".join([*parts, *rows])


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    q: np.ndarray  # (T, N, H)
    k_pages: np.ndarray  # (L, P, K, S, H)
    v_pages: np.ndarray
    tables: np.ndarray  # (B, M)
    lengths: np.ndarray  # (B,)
    query_starts: np.ndarray  # (B + 1,)
    sinks: np.ndarray | None  # (N,)


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands of a case."""
    random = np.random.default_rng(seed)
    owned = [-(-length // case.page_size) for length in case.lengths]
    num_pages = case.num_pages or 1 + sum(owned) + _SPARE_PAGES
    first_page = num_pages - sum(owned)
    order = iter(random.permutation(np.arange(first_page, num_pages)))
    tables = np.zeros((len(owned), max(owned) + 1), np.int32)
    k_pages, v_pages = (_poisoned(case, num_pages) for _ in range(2))
    for row, (count, length) in enumerate(zip(owned, case.lengths, strict=True)):
        tables[row, :count] = [next(order) for _ in range(count)]
        for position in range(length):
            page, slot = tables[row, position // case.page_size], position % case.page_size
            for pages in (k_pages, v_pages):
                pages[:, page, :, slot] = _numbers(case, random, (NUM_LAYERS, case.num_kv_heads, case.dim))
    num_tokens = sum(case.counts) + case.padding
    q = random.standard_normal((num_tokens, case.num_heads, case.dim)).astype(_dtype(case.dtype))
    sinks = random.standard_normal(case.num_heads).astype(np.float32) if case.has_sinks else None
    lengths = np.array(case.lengths, np.int32)
    return Operands(q, k_pages, v_pages, tables, lengths, case.query_starts, sinks)


def long_row(count: int, length: int, page_size: int = 64) -> tuple[Case, Operands]:
    """`count` queries of a row of `length` tokens, which are many whole pages, and a short row.

    Most pages are one page of zero keys, again and again. Seven others lie far apart, from the first to the last place,
    and get about all the attention, each as much as the next: the answer shows if one is not seen.
    """
    case = Case((count, 1), (8 * page_size, 3), num_heads=2, num_kv_heads=1, page_size=page_size)
    given, random = operands(case), np.random.default_rng(1)
    common, *marked = given.tables[0, :8]
    given.k_pages[:, common], given.k_pages[:, marked], given.q[:count] = 0, 0.5, 2.5  # scores of 0 and of 10
    for page in marked:
        given.v_pages[:, page] = random.standard_normal(case.dim) * 4
    tables = np.full((2, length // page_size), common, np.int32)
    tables[0, np.linspace(0, length // page_size - 1, len(marked)).astype(int)] = marked
    tables[1, 0] = given.tables[1, 0]
    lengths = (length, 3)
    return replace(case, lengths=lengths), given._replace(tables=tables, lengths=np.array(lengths, np.int32))


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T N H"]:
    """Attend with the queries of a case. See `ops.OpCases`."""
    q, k_pages, v_pages, tables, lengths, query_starts, sinks = as_arrays(given)
    pool = (q, k_pages, v_pages, jnp.int32(LAYER), tables, lengths)
    if case.is_decode:
        return decode_attention(*pool, scoring=case.scoring, sinks=sinks, backend=backend)
    num_decode_rows = jnp.int32(case.num_decode_rows)
    ragged = ragged_layout(query_starts, num_decode_rows, num_tokens=len(given.q), backend=backend)
    return mixed_attention(*pool, ragged, scoring=case.scoring, sinks=sinks, backend=backend)


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCES. Padding after the last row must be finite. See `ops.OpCases`."""
    wanted, found = expected(case, given), np.asarray(out, np.float64)
    difference = float(np.abs(found[: len(wanted)] - wanted).max(initial=0.0))
    return difference / TOLERANCES[case.dtype] if np.isfinite(found).all() else np.inf


def expected(case: Case, given: Operands) -> np.ndarray:
    """The answer for every token that a row has: (sum of counts, N, H)."""
    group = case.num_heads // case.num_kv_heads
    out = np.zeros((sum(case.counts), case.num_heads, case.dim))
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        if length == 0:
            continue
        keys, values = (
            np.repeat(_row(pages, given.tables[row], length), group, axis=1) for pages in (given.k_pages, given.v_pages)
        )  # (X, N, H)
        for i in range(count):
            token, position = given.query_starts[row] + i, length - count + i
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            seen = slice(first, position + 1)
            out[token] = _attend(case, given, given.q[token].astype(np.float64), keys[seen], values[seen])
    return out


def _attend(case: Case, given: Operands, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    scores = np.einsum("nh,xnh->nx", q, keys) * case.scoring.scale
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    if given.sinks is not None:
        total = total + np.exp(given.sinks[:, None] - highest)
    out: np.ndarray = np.einsum("nx,xnh->nh", weights / total, values)
    return out


def _row(pages: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
    """A row's keys or values in order: (X, K, H)."""
    own: np.ndarray = pages[LAYER][table].astype(np.float64).transpose(0, 2, 1, 3)
    return own.reshape(-1, *own.shape[2:])[:length]


def _poisoned(case: Case, num_pages: int) -> np.ndarray:
    """A pool in which nothing may be read: what is a number there is a huge one."""
    dtype = _dtype(case.kv_dtype or case.dtype)
    huge = 127 if dtype == np.int8 else 400
    pages = np.full((NUM_LAYERS, num_pages, case.num_kv_heads, case.page_size, case.dim), huge, dtype)
    if dtype != np.int8:
        owned = sum(-(-length // case.page_size) for length in case.lengths)
        pages[:, 1 : num_pages - owned] = np.nan
    return pages


def _numbers(case: Case, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    dtype = _dtype(case.kv_dtype or case.dtype)
    numbers = random.standard_normal(shape)
    return (np.round(numbers) if dtype == np.int8 else numbers).astype(dtype)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


_RAGGED = Case((1, 1, 1, 1), (5, 77, 1, 0))
CASES = (
    _RAGGED,
    Case((1, 1, 1), (16, 64, 65), num_heads=8, num_kv_heads=1, dtype="float16", num_pages=400),
    Case((1, 1), (200, 1), num_heads=9, num_kv_heads=3, dim=128, page_size=32),
    Case((1, 1), (100, 129), num_heads=2, num_kv_heads=2, dim=80, page_size=128),
    Case((1, 1), (7, 90), dim=96, has_sinks=True, scale=0.25),
    Case((1, 1), (33, 66), dim=256, softcap=20.0),
    Case((1, 1, 1), (64, 65, 300), sliding_window=64, has_sinks=True),
    Case((1, 1), (130, 20), sliding_window=1, softcap=5.0),
    replace(_RAGGED, kv_dtype="float8_e4m3fn", dim=128),
    replace(_RAGGED, kv_dtype="int8", dtype="float16"),
    Case((1, 1), (90, 3), kv_dtype="float8_e4m3fn", dim=80, page_size=64),
    Case((1, 1), (600, 1300), num_heads=2, num_kv_heads=1),
    Case((1, 1, 9, 70, 1, 0), (40, 1, 9, 133, 21, 0), padding=3),
    Case((128, 5), (128, 300), num_heads=2, num_kv_heads=1, dim=128, dtype="float16", num_pages=300),
    Case((3, 130), (67, 200), num_heads=3, num_kv_heads=1, page_size=32, sliding_window=50),
    Case((20, 33), (20, 65), dim=80, softcap=10.0),
    Case((17, 8), (64, 8), num_heads=2, dim=96, has_sinks=True, scale=0.04),
    Case((5, 65), (70, 65), num_heads=2, dim=256, page_size=64, sliding_window=30, has_sinks=True),
    Case((1, 40), (30, 90), kv_dtype="float8_e4m3fn"),
    Case((70,), (100,), num_heads=2, dim=128, kv_dtype="int8", dtype="float16"),
    Case((2, 1, 5), (40, 0, 5)),
    Case((1, 70), (70, 170), num_heads=2, num_kv_heads=1, dim=256, kv_dtype="int8", dtype="float16", sliding_window=90),
)
"""Ragged, empty and one-token rows, and one of a token and no keys; borders of pages, tiles and windows; page numbers far
apart; every option."""
SLOW = tuple(case for case in CASES if case.kv_dtype != "int8")
BACKENDS: tuple[Backend, ...] = ()
"""Tests of their own run the kernels for Hopper and TPUs in the interpreter: tests/kernels/test_paged_attention_gpu.py, tests/kernels/tpu."""
