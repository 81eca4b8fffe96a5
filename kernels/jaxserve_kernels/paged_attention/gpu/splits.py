"""Cuts the rows of a decode step into parts for the workers of the GPU kernel.

Parts are pieces of a row's tiles of keys. Only parts that exist become units of work, the longest first, so that
workers that take them in turns finish together (longest processing time first, R. L. Graham, SIAM J. Appl. Math. 17, 1969).
How a row is cut depends on its own length, so that its result does not depend on its neighbours; only when the parts of
many long rows are more than there is room for, all long rows get fewer.

Plain JAX. Letters: B rows, U parts of all rows, C sizes that are tried.
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
    """Static facts: how far rows are cut."""

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
        sizes = self._sizes(num_tiles)
        parts_of_row = _ceil(num_tiles, sizes)
        # Rank by the size of a part, and by number between equals: all against all, since a sort is several launches.
        mine, other = sizes[:, None], sizes[None, :]
        number = jnp.arange(self.num_rows)
        is_before = (other > mine) | ((other == mine) & (number[None, :] < number[:, None]))
        first_parts = jnp.where(is_before, parts_of_row[None, :], 0).sum(1, dtype=jnp.int32)
        part = jnp.arange(self.num_parts)[:, None]
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
