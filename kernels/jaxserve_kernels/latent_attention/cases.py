"""Conformance cases of attention over latent vectors: those of `paged_attention` with one KV head whose keys are its values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.latent_attention.api import decode_attention, mixed_attention
from jaxserve_kernels.latent_attention.tuning import decode_tuning
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.paged_attention import cases, ragged_layout
from jaxserve_kernels.paged_attention.cases import LAYER, TOLERANCES
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import DecodeTuning


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Fields as in `paged_attention.cases.Case`."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_heads: int = 16
    width: int = 576
    value_width: int = 512
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    softcap: float | None = None
    padding: int = 0
    num_pages: int | None = None

    @property
    def rows(self) -> cases.Case:
        """Return the rows as a case of keys and values of one head."""
        return cases.Case(
            counts=self.counts,
            lengths=self.lengths,
            num_heads=self.num_heads,
            num_kv_heads=1,
            dim=self.width,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            softcap=self.softcap,
            padding=self.padding,
            num_pages=self.num_pages,
        )

    @property
    def scoring(self) -> Scoring:
        return self.rows.scoring

    @property
    def few_programs(self) -> DecodeTuning:
        """Sizes by which each program of the kernel does several units, and rows have several parts."""
        tuning = decode_tuning("h200", self.width, 2 if self.kv_dtype is None else 1)
        return replace(tuning, programs=2, min_split=64, long_split=128, waves=8)

    def __str__(self) -> str:
        return f"{self.rows}-values{self.value_width}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    q: np.ndarray  # (T, N, W)
    pages: np.ndarray  # (L, P, 1, S, W)
    tables: np.ndarray  # (B, M)
    lengths: np.ndarray  # (B,)
    query_starts: np.ndarray  # (B + 1,)


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands of a case."""
    q, pages, _, tables, lengths, query_starts, _ = cases.operands(case.rows, seed)
    return Operands(q, pages, tables, lengths, query_starts)


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T N V"]:
    """Attend with the queries of a case. See `ops.OpCases`."""
    q, pages, tables, lengths, query_starts = as_arrays(given)
    pool = (q, pages, jnp.int32(LAYER), tables, lengths)
    options: dict[str, Any] = {"value_width": case.value_width, "scoring": case.scoring}
    if case.rows.is_decode and not is_emulated:
        return decode_attention(*pool, **options, backend=backend)
    ragged = ragged_layout(query_starts, jnp.int32(case.rows.num_decode_rows), num_tokens=len(given.q))
    if not is_emulated:
        return mixed_attention(*pool, ragged, **options, backend=backend)
    from jaxserve_kernels.latent_attention.gpu import attention

    options |= {"tuning": case.few_programs, "is_emulated": True}
    found: Array = (
        attention.decode_attention(*pool, **options)
        if case.rows.is_decode
        else attention.mixed_attention(*pool, ragged, **options)
    )
    return found


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCES. Padding after the last row must be finite. See `ops.OpCases`."""
    wanted, found = expected(case, given), np.asarray(out, np.float64)
    difference = float(np.abs(found[: len(wanted)] - wanted).max(initial=0.0))
    return difference / TOLERANCES[case.dtype] if np.isfinite(found).all() else np.inf


def expected(case: Case, given: Operands) -> np.ndarray:
    """The answer for every token that a row has: (sum of counts, N, V)."""
    alike = cases.Operands(given.q, given.pages, given.pages, *given[2:], sinks=None)
    return cases.expected(case.rows, alike)[..., : case.value_width]


CASES = (
    Case((1, 1, 1, 1), (5, 77, 1, 0)),
    Case((1, 1), (130, 1), num_heads=80, page_size=32),
    Case((1, 1, 1), (64, 65, 0), num_heads=5, width=320, value_width=256, page_size=128, softcap=20.0),
    Case((1, 1), (200, 16), num_heads=128, dtype="float16", page_size=64),
    Case((1, 1), (600, 1300), num_heads=20, num_pages=400),
    Case((1, 1, 9, 70, 1, 0), (40, 1, 9, 133, 21, 0), num_heads=4, padding=3),
    Case((4, 1, 3, 4, 2, 0), (130, 64, 66, 4, 321, 0), padding=2),
    Case((2, 2), (65, 300), num_heads=80),
    Case((1, 1, 1, 1), (5, 77, 1, 200), kv_dtype="float8_e4m3fn"),
    Case((3, 2), (66, 300), num_heads=20, dtype="float16", kv_dtype="float8_e4m3fn", width=320, value_width=256),
)
"""Ragged, empty and one-token rows; borders of pages and tiles; page numbers far apart; heads that fill one tile of
64, none and several; rows of one part and of several; drafts to verify, as many as
tiles have tokens and fewer, whose keys begin a tile."""
SLOW = CASES
BACKENDS: tuple[Backend, ...] = ("mosaic_gpu",)
