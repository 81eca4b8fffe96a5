"""Cuts the rows of a decode step, and tiles of query segments, into parts for the workers of the GPU kernels.

Parts are pieces of a row's tiles of keys. Only parts that exist become units of work, the longest first, so that
workers that take them in turns finish together (longest processing time first, R. L. Graham, SIAM J. Appl. Math. 17, 1969).
How a row is cut depends on its own length, so that its result does not depend on its neighbours; only when the parts of
many long rows are more than there is room for, all long rows get fewer. Tiles of a segment are cut by their row's own length
and number of tiles alone.

Plain JAX. Letters: B rows, or tiles of segments, U parts of all rows, C sizes that are tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve_kernels.paged_attention.tuning import DecodeTuning

_MOST_JOINED = 2048
"""Parts of all rows that are joined, those that do not exist included: 8.4 MB of one layer of Llama-3.1-8B at 256 rows and 2 parts each."""
_SHORT = 1024
"""Keys of a row that is short."""
SLOT = 8
"""Rows of a slot, in which the results of parts of segments are kept: a part fills as many as its queries need."""
_ROOM_OF_SEGMENTS = 256 << 20
"""Bytes for the results of all parts of the query segments of a step."""
_MOST_PARTS, _FEWEST_PARTS = 32, 8
"""Bounds of the number of parts of one long row, unless few rows need more to fill the device."""


class Parts(NamedTuple):
    """Parts of all rows: `num_parts` of them are real. Those of a row stand side by side."""

    num_parts: Int[Array, "1"]
    rows: Int[Array, "U"]
    first_tiles: Int[Array, "U"]
    counts: Int[Array, "U"]
    """Tiles of each part."""
    first_parts: Int[Array, "B"]
    """The first part of each row."""
    parts_of_row: Int[Array, "B"]
    """0 for a row that sees nothing."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """Compile-time parameters: how far rows are cut."""

    num_rows: int
    parallel: int
    """Parts of a row of which each has at least `min_tiles`: as many as fill the device when all rows are alike."""
    min_tiles: int
    most_parts: int
    """Parts of the longest row."""
    long_tiles: int
    """Tiles of a part of a row that is long, unless it would have more than `most_parts`."""
    num_tries: int
    """Sizes that are tried for long rows: each is twice the one before, and the last one cuts none."""
    num_parts: int
    """Parts that there is room for."""

    def cut(self, first_tiles: Int[Array, "B"], num_tiles: Int[Array, "B"]) -> Parts:
        """Return the parts of rows that see `num_tiles` tiles from `first_tiles` on."""
        return _parts(first_tiles, num_tiles, self._sizes(num_tiles), self.num_parts)

    def _sizes(self, num_tiles: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return the tiles of each row's parts, 0 for a row without tiles."""
        of_short = jnp.minimum(_ceil(num_tiles, self.min_tiles), self.parallel)
        tried = [self.long_tiles << i for i in range(self.num_tries)]
        of_long = [jnp.minimum(_ceil(num_tiles, size), self.most_parts) for size in tried]
        wanted = jnp.stack([jnp.maximum(of_short, parts) for parts in of_long])  # (C, B)
        sizes = jnp.maximum(_ceil(num_tiles[None, :], jnp.maximum(wanted, 1)), 1)
        fits = _ceil(num_tiles[None, :], sizes).sum(1) <= self.num_parts
        chosen = jnp.argmax(fits.at[-1].set(True))
        return jnp.where(num_tiles > 0, sizes[chosen], 0)


class Slots(NamedTuple):
    """Slots of the results of parts of segments."""

    of_parts: Int[Array, "U"]
    """The first slot of each part."""
    of_tiles: Int[Array, "B"]
    """The first slot of each tile's first part; those of the next parts follow."""
    in_parts: Int[Array, "B"]
    """Slots of each part of a tile."""


@dataclass(frozen=True, slots=True)
class SegmentCutting:
    """Compile-time parameters: how far tiles of query segments are cut. There is room for every part that there can be."""

    num_parts: int
    num_slots: int
    parts_of_segment: int
    """Parts that the tiles of a segment share equally, rounded up."""
    min_tiles: int
    """Tiles of keys that a part has at least, if it is not a whole row."""

    def cut(
        self,
        first_tiles: Int[Array, "B"],
        num_tiles: Int[Array, "B"],
        tiles_of_segment: Int[Array, "B"],
        used_rows: Int[Array, "B"],
    ) -> tuple[Parts, Slots]:
        """Return the parts of tiles of queries that see `num_tiles` tiles of keys from `first_tiles` on.

        tiles_of_segment: number of tiles of queries of the segment that each belongs to. used_rows: rows of results of each.
        """
        most = -(-self.parts_of_segment // jnp.maximum(tiles_of_segment, 1))
        wanted = jnp.minimum(_ceil(num_tiles, self.min_tiles), most)
        parts = _parts(first_tiles, num_tiles, _ceil(num_tiles, wanted), self.num_parts)
        in_parts = _ceil(used_rows, SLOT)
        filled = parts.parts_of_row * in_parts
        of_tiles = jnp.cumsum(filled, dtype=jnp.int32) - filled
        place = jnp.arange(self.num_parts, dtype=jnp.int32) - parts.first_parts[parts.rows]
        return parts, Slots(of_tiles[parts.rows] + place * in_parts[parts.rows], of_tiles, in_parts)


def make_segment_cutting(
    num_tiles: int, num_segments: int, most_slots: int, slot_bytes: int, min_tiles: int
) -> SegmentCutting:
    """Return how up to `num_tiles` tiles of queries of up to `num_segments` segments are cut, so that the results of all
    parts fit into the room for them. most_slots: slots of the results of all tiles, if none is cut."""
    parts_of_segment = max(1, min(_MOST_PARTS, _ROOM_OF_SEGMENTS // (most_slots * slot_bytes)))
    num_parts = num_tiles + num_segments * (parts_of_segment - 1)
    return SegmentCutting(num_parts, most_slots * parts_of_segment, parts_of_segment, min_tiles)


def slot_bytes(num_kv_heads: int, dim: int) -> int:
    """Return the bytes of a slot of all KV heads, in float32."""
    return 4 * num_kv_heads * SLOT * dim


def _parts(first_tiles: Int[Array, "B"], num_tiles: Int[Array, "B"], sizes: Int[Array, "B"], num_parts: int) -> Parts:
    """Cut rows into parts of so many tiles, 0 for a row without tiles."""
    num_rows = len(num_tiles)
    parts_of_row = _ceil(num_tiles, sizes)
    # Rank by the size of a part, and by number between equals: all against all, since a sort is several launches.
    mine, other = sizes[:, None], sizes[None, :]
    number = jnp.arange(num_rows)
    is_before = (other > mine) | ((other == mine) & (number[None, :] < number[:, None]))
    first_parts = jnp.where(is_before, parts_of_row[None, :], 0).sum(1, dtype=jnp.int32)
    part = jnp.arange(num_parts)[:, None]
    is_owner = (part >= first_parts) & (part < first_parts + parts_of_row)  # (U, B)

    def of_owner(values: Int[Array, "B"]) -> Int[Array, "U"]:
        return jnp.where(is_owner, values, 0).sum(1, dtype=jnp.int32)

    size, place = of_owner(sizes), part[:, 0] - of_owner(first_parts)
    return Parts(
        parts_of_row.sum(dtype=jnp.int32)[None],
        of_owner(number.astype(jnp.int32)),
        of_owner(first_tiles) + place * size,
        jnp.clip(of_owner(num_tiles) - place * size, 0, size),
        first_parts,
        parts_of_row,
    )


def _ceil(x: Int[Array, "..."], divisor: Int[Array, "..."] | int) -> Int[Array, "..."]:
    """Divide and round up; 0 by 0 is 0."""
    divisor = jnp.maximum(divisor, 1)
    quotient: Array = (x + divisor - 1) // divisor
    return quotient.astype(jnp.int32)


def make_cutting(tuning: DecodeTuning, num_rows: int, num_kv_heads: int, num_workers: int, longest: int) -> Cutting:
    """Return how `num_rows` rows of up to `longest` keys are cut for `num_workers` workers."""
    parallel = tuning.waves * num_workers // (num_rows * num_kv_heads)
    parallel = max(1, min(parallel, -(-longest // tuning.min_split)))
    # As much as each worker has to do when rows are short: a larger part would keep the others waiting.
    share = 1 << math.ceil(math.log2(max(1, num_rows * num_kv_heads * _SHORT // num_workers)))
    long_tiles = max(1, max(share, tuning.long_split) // tuning.tile)
    num_tiles = -(-longest // tuning.tile) + 1  # one more if the row does not begin with a whole one
    most = min(_MOST_PARTS, max(_FEWEST_PARTS, _MOST_JOINED // num_rows))
    most_parts = max(parallel, min(most, -(-num_tiles // long_tiles)))
    spare = min(tuning.long_parts, num_rows * (most_parts - parallel))
    return Cutting(
        num_rows=num_rows,
        parallel=parallel,
        min_tiles=max(1, tuning.min_split // tuning.tile),
        most_parts=most_parts,
        long_tiles=long_tiles,
        num_tries=1 + max(0, math.ceil(math.log2(num_tiles / long_tiles))),
        num_parts=num_rows * parallel + spare,
    )
