"""Rows of a step for recurrent layers: the row of each token, and the cut of long rows into chunks.

Computed once a step, shared by all layers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

CHUNK: Final = 32
"""Tokens of a chunk. Chunks begin at multiples of it in their text, so a state at such a position does not depend on how
the text before was divided into steps."""


class Chunks(NamedTuple):
    """Rows after the decode rows, cut into parts of at most CHUNK tokens. They follow the token order."""

    num_decode_rows: Int[Array, ""]
    """Rows before the others that have one token each, and no chunks."""
    rows: Int[Array, "G"]
    starts: Int[Array, "G"]
    """First token of each chunk on the flat axis."""
    sizes: Int[Array, "G"]
    num_chunks: Int[Array, ""]


class WholeChunks(NamedTuple):
    """The chunks of CHUNK tokens, which the step has from their first token to their last. They follow the token order."""

    firsts: Int[Array, "B"]
    """Number of the first whole chunk of each row, if it has any."""
    counts: Int[Array, "B"]
    starts: Int[Array, "W"]
    """First token of each whole chunk on the flat axis; a token of the step for chunks that do not exist."""


class Segments(NamedTuple):
    """Rows on the flat token axis: row b has tokens `starts[b] : starts[b + 1]`; later tokens are padding."""

    starts: Int[Array, "B1"]  # B + 1 borders
    rows: Int[Array, "T"]
    """Row of each token."""
    chunks: Chunks | None
    """None: one token per row, token i belongs to row i."""
    whole: WholeChunks | None = None
    """None: no row has a whole chunk."""

    def without_whole_chunks(self) -> Segments:
        """Return the segments of a step in which no row has a whole chunk."""
        return self._replace(whole=None)


def decode_segments(starts: Int[Array, "B1"]) -> Segments:
    """Return the segments of a decode program: token i is row i's only one. A row without a token is padding."""
    return Segments(starts, jnp.arange(starts.shape[0] - 1, dtype=jnp.int32), None)


def cut_segments(
    starts: Int[Array, "B1"], positions: Int[Array, "B"], num_decode_rows: Int[Array, ""], *, num_tokens: int
) -> Segments:
    """Cut every row after the decode rows into chunks; `positions` are those of the rows' first tokens in their texts."""
    num_rows = positions.shape[0]
    counts = starts[1:] - starts[:-1]
    is_cut = (counts > 0) & (jnp.arange(num_rows) >= num_decode_rows)
    skipped = positions % CHUNK  # tokens of the row's first chunk that earlier steps computed
    num_chunks = jnp.where(is_cut, -(-(skipped + counts) // CHUNK), 0)  # (B,)
    ends = jnp.cumsum(num_chunks)
    index = jnp.arange(max_chunks(num_tokens, num_rows))
    # All against all: a binary search is a loop, and a loop is part of no CUDA graph.
    rows = jnp.searchsorted(ends, index, side="right", method="compare_all")
    rows = jnp.minimum(rows, num_rows - 1).astype(jnp.int32)
    order = index - (ends - num_chunks)[rows]  # 0 for the first chunk of a row
    aligned = starts[:-1][rows] - skipped[rows] + order * CHUNK
    first = jnp.maximum(aligned, starts[:-1][rows])
    end = jnp.minimum(aligned + CHUNK, starts[1:][rows])
    chunks = Chunks(num_decode_rows, rows, first, end - first, ends[-1])
    token_rows = jnp.searchsorted(starts[1:], jnp.arange(num_tokens), side="right", method="compare_all")
    whole = _whole_chunks(starts, skipped, num_tokens)
    return Segments(starts, jnp.minimum(token_rows, num_rows - 1).astype(jnp.int32), chunks, whole)


def _whole_chunks(starts: Int[Array, "B1"], skipped: Int[Array, "B"], num_tokens: int) -> WholeChunks | None:
    if num_tokens < CHUNK:
        return None
    counts = starts[1:] - starts[:-1]
    ahead = -skipped % CHUNK  # tokens before the row's first border
    num_whole = jnp.maximum(counts - ahead, 0) // CHUNK  # (B,)
    ends = jnp.cumsum(num_whole, dtype=jnp.int32)
    index = jnp.arange(num_tokens // CHUNK, dtype=jnp.int32)
    rows = jnp.searchsorted(ends, index, side="right", method="compare_all")
    rows = jnp.minimum(rows, len(ends) - 1)
    order = index - (ends - num_whole)[rows]
    first = starts[:-1][rows] + ahead[rows] + order * CHUNK
    return WholeChunks(ends - num_whole, num_whole, jnp.clip(first, 0, num_tokens - CHUNK).astype(jnp.int32))


def max_chunks(num_tokens: int, num_rows: int) -> int:
    """Return the largest number of chunks: each row may add one that begins and one that ends within its text."""
    num_rows = min(num_rows, num_tokens)
    rest = num_tokens - num_rows
    return num_rows + min(rest, num_rows) + max(rest - num_rows, 0) // CHUNK
