"""Conformance cases of attention to windows and compressed blocks: rows of any lengths, whose last tokens a step computes.

What a token adds to vectors of blocks is written by the step for its own tokens; everything that no token may read is not a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.compressed_attention.api import (
    block_slots,
    closing_tokens,
    compress,
    write,
    write_and_attend,
    write_blocks,
)
from jaxserve_kernels.compressed_attention.reference import Compressed, Mixture
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.paged_attention import Paging, Scoring, ragged_layout
from jaxserve_kernels.paged_attention.cases import TOLERANCES

_LAYER = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One call, by rows: the tokens that a step computes, and the tokens of the row with these."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    rate: int
    window: int
    overlaps: bool = False
    num_chosen: int | None = None
    """Blocks that a query attends to: those with odd numbers first, then the others. None: all."""
    num_heads: int = 3
    dim: int = 24
    page_size: int = 16
    dtype: str = "float32"

    def __str__(self) -> str:
        rows = "-".join(f"{count}of{length}" for count, length in zip(self.counts, self.lengths, strict=True))
        kind = "overlapping" if self.overlaps else "apart"
        chosen = "" if self.num_chosen is None else f"-best{self.num_chosen}"
        return f"{rows}-rate{self.rate}-{kind}{chosen}-window{self.window}-page{self.page_size}-{self.dtype}"

    @property
    def parts(self) -> int:
        """Return the numbers that a token adds, which have as many scores."""
        return self.dim * (2 if self.overlaps else 1)


class Operands(NamedTuple):
    """Arrays of one call. The pools have what earlier steps have written; `added` and `vectors` what the tokens write."""

    q: np.ndarray  # (T, N, H)
    vectors: np.ndarray  # (T, H)
    added: np.ndarray  # (T, W)
    bias: np.ndarray  # (X, D)
    sinks: np.ndarray  # (N,)
    pages: np.ndarray  # (L, P, 1, S, H)
    added_pages: np.ndarray  # (L, P, 1, S, W)
    block_pages: np.ndarray  # (L, P, 1, U, H)
    chosen: np.ndarray  # (T, C)
    tables: np.ndarray  # (B, M)
    lengths: np.ndarray  # (B,)
    query_starts: np.ndarray  # (B + 1,)
    token_pages: np.ndarray  # (T,)
    token_slots: np.ndarray  # (T,)
    texts: np.ndarray  # (B, longest, H + W): vectors of all tokens, and what they add


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands of a case. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    num_tokens, longest, size = sum(case.counts), max(case.lengths), case.page_size
    num_pages = -(-longest // size)
    width = 2 * case.parts
    texts = random.standard_normal((len(case.counts), longest, case.dim + width)).astype(np.float32)
    texts = texts.astype(np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))).astype(np.float32)
    pools = [
        np.full((2, 1 + len(case.counts) * num_pages, 1, slots, each), np.nan, np.float32)
        for slots, each in ((size, case.dim), (size, width), (block_slots(size, case.rate), case.dim))
    ]
    bias = random.standard_normal((case.rate, case.parts)).astype(np.float32)
    tables = 1 + random.permutation(len(case.counts) * num_pages).reshape(len(case.counts), -1)
    starts = np.concatenate([[0], np.cumsum(case.counts)])
    token_pages, token_slots = np.zeros((2, num_tokens), np.int32)
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        blocks = _blocks(case, texts[row, :length, case.dim :].astype(np.float64), bias)
        for position in range(length):
            page, slot = tables[row, position // size], position % size
            token = starts[row] + position - (length - count)
            if position >= length - count:
                token_pages[token], token_slots[token] = page, slot
                continue
            pools[0][_LAYER, page, 0, slot] = texts[row, position, : case.dim]
            pools[1][_LAYER, page, 0, slot] = texts[row, position, case.dim :]
            if (position + 1) % case.rate == 0:
                pools[2][_LAYER, page, 0, slot // case.rate] = blocks[position // case.rate]
    own = np.concatenate(
        [texts[row, length - n : length] for row, (n, length) in enumerate(zip(case.counts, case.lengths, strict=True))]
    )
    chosen = np.zeros((num_tokens, case.num_chosen or 0), np.int32)
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        for i in range(count if case.num_chosen else 0):
            found = _choice(case, (length - count + i + 1) // case.rate)
            chosen[starts[row] + i, : len(found)] = found
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    return Operands(
        (2 * random.standard_normal((num_tokens, case.num_heads, case.dim))).astype(dtype),
        own[:, : case.dim].astype(dtype),
        own[:, case.dim :].astype(dtype),
        bias,
        np.linspace(-1, 2, case.num_heads, dtype=np.float32),
        pools[0].astype(dtype),
        pools[1].astype(dtype),
        pools[2].astype(dtype),
        chosen,
        tables.astype(np.int32),
        np.asarray(case.lengths, np.int32),
        starts.astype(np.int32),
        token_pages,
        token_slots,
        texts,
    )


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T N H"]:
    """Write, compress and attend. See `ops.OpCases`."""
    own, layer = as_arrays(given), jnp.int32(_LAYER)
    num_tokens, is_decode = len(given.q), max(case.counts) == 1
    ragged = None if is_decode else ragged_layout(own.query_starts, jnp.int32(0), num_tokens=num_tokens)
    paging = Paging(own.tables, own.lengths, own.query_starts, own.token_pages, own.token_slots, ragged)
    added = write(own.added, own.added_pages, layer, paging)
    closing = closing_tokens(paging, num_tokens, case.rate)
    mixture = Mixture(case.rate, 0, case.dim, case.overlaps)
    made = compress(added, layer, paging, closing, own.bias, mixture, backend=backend)
    pages = write_blocks(made, own.block_pages, layer, paging, closing, case.rate)
    blocks = Compressed(pages, layer, paging, None if case.num_chosen is None else own.chosen)
    options: dict[str, Any] = {
        "window": case.window,
        "rate": case.rate,
        "scoring": Scoring(scale=case.dim**-0.5),
        "sinks": own.sinks,
        "backend": backend,
    }
    return write_and_attend(own.q, own.vectors, own.pages, layer, paging, blocks, **options)[0]


def error(case: Case, given: Operands, out: object) -> float:
    """Return the largest error relative to TOLERANCES. See `ops.OpCases`."""
    wanted, found = expected(case, given), np.asarray(out, np.float64)
    difference = float(np.abs(found - wanted).max(initial=0.0))
    return difference / TOLERANCES[case.dtype] if np.isfinite(found).all() else np.inf


def expected(case: Case, given: Operands) -> np.ndarray:
    """Return the answer for every token, from the whole texts."""
    out = np.zeros(given.q.shape)
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        text = given.texts[row, :length].astype(np.float64)
        blocks = _blocks(case, text[:, case.dim :], given.bias)
        for i in range(count):
            token, end = given.query_starts[row] + i, length - count + i + 1
            seen = blocks[_choice(case, end // case.rate)]
            vectors = np.concatenate([text[max(0, end - case.window) : end, : case.dim], seen])
            found = np.exp(vectors @ given.q[token].astype(np.float64).T * case.dim**-0.5)  # (X, N)
            out[token] = (found / (found.sum(0) + np.exp(given.sinks.astype(np.float64)))).T @ vectors
    return out


def _choice(case: Case, count: int) -> np.ndarray:
    """Return the blocks that a query attends to, of `count` blocks before it."""
    if case.num_chosen is None or count <= case.num_chosen:
        return np.arange(count)
    return np.sort(np.concatenate([np.arange(1, count, 2), np.arange(0, count, 2)])[: case.num_chosen])


def _blocks(case: Case, added: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the vectors of the blocks of a text."""
    count, parts = len(added) // case.rate, case.parts
    cut = added[: count * case.rate].reshape(count, case.rate, 2 * parts)
    numbers, scores = cut[..., :parts], np.exp(cut[..., parts:] + bias)
    if case.overlaps:
        empty = np.zeros((1, case.rate, case.dim))
        numbers, scores = (
            np.concatenate([np.concatenate([empty, x[:, :, : case.dim]])[:-1], x[:, :, case.dim :]], 1)
            for x in (numbers, scores)
        )
    made: np.ndarray = (numbers * scores).sum(1) / scores.sum(1)
    return made


CASES = (
    Case((1, 1, 1), (13, 40, 3), 4, 8, overlaps=True),
    Case((9, 1, 40), (9, 33, 61), 4, 8, overlaps=True, num_chosen=3),
    Case((20, 7), (45, 7), 6, 5),
    Case((1, 50), (95, 130), 24, 32, page_size=16),
    Case((30,), (700,), 4, 16, overlaps=True, dtype="bfloat16"),
    Case((1, 1), (600, 599), 8, 600, num_chosen=20, page_size=32, dtype="float16"),
)
"""Rows of a token, of several and of tiles; blocks that end in a step or did so before, that are longer than a page, that do not divide
it, and that are shorter than a page; texts shorter than a window or a block; choices that few or all blocks are enough for."""
SLOW = CASES[3:]
BACKENDS: tuple[Backend, ...] = ("bucketed",)
