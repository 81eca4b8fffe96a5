"""Code that both kernels for Hopper share: tiles in shared memory, fetching pages, scores.

Letters as in `api`; X keys of one tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxserve_kernels.paged_attention.options import Scoring

LOG2E = math.log2(math.e)
MASKED = -1e30
"""Score of a key that must not be seen: finite, so that differences of maxima stay numbers."""
LEAST = 1e-30
"""Value of a sum of weights that saw no key: the result is zero, not a division by zero."""


class SegmentRefs(NamedTuple):
    """Operands and the result of a kernel for query segments, in device memory."""

    q: Any
    k: Any
    v: Any
    layer: Any
    tables: Any
    lengths: Any
    query_starts: Any
    tile_rows: Any
    tile_starts: Any
    num_tiles: Any
    sinks: Any
    out: Any


def scores(scoring: Scoring, matmuls: jax.Array) -> jax.Array:
    """Scores times log2(e), so that exponentials are powers of two."""
    if scoring.softcap is None:
        return matmuls * (scoring.scale * LOG2E)
    return jnp.tanh(matmuls * (scoring.scale / scoring.softcap)) * (scoring.softcap * LOG2E)


def lowest_key(scoring: Scoring, position: jax.Array) -> jax.Array:
    """The first key that a query at `position` sees."""
    if scoring.sliding_window is None:
        return jnp.int32(0)
    return jnp.maximum(position - (scoring.sliding_window - 1), 0)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles that tensor cores and bulk copies take, with the widest swizzle that fits.

    Rows that no swizzle fits (80 bytes) lie one after the other: only `widen` takes them.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    # 8-bit tiles are read piece by piece, and a piece is whole swizzled columns.
    swizzle = min(plgpu.find_swizzle(shape[-1] * bits), 64 if bits == 8 else 128)
    if swizzle < _NARROWEST_SWIZZLE:
        return plgpu.SMEM(shape, dtype)
    transforms = (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


_NARROWEST_SWIZZLE = 32


def whole(*arrays: jax.Array) -> Sequence[jax.Array]:
    """Return arrays that a kernel can be given: none is a part of another one.

    XLA passes the address of a part instead of copying it, and Mosaic refuses addresses that are no multiples of 256 bytes.
    """
    found: Sequence[jax.Array] = jax.lax.optimization_barrier(arrays)
    return found


def row_vector(value: float, rows: int) -> jax.Array:
    """One number per row of a matmul."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def zeros(rows: int, columns: int) -> jax.Array:
    """An empty accumulator."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def iota(shape: tuple[int, int], dimension: int) -> jax.Array:
    """Row or column numbers in the layout of a matmul."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def row_numbers(rows: int) -> jax.Array:
    """One number per row of a matmul: which row it is."""
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=plgpu.Layout.WGMMA.reduce(1))


def across(vector: jax.Array, columns: int) -> jax.Array:
    """A number per row, as wide as the matmul."""
    return jax.lax.broadcast_in_dim(vector, (vector.shape[0], columns), [0])


def matmul(a: Any, b: Any) -> jax.Array:
    """a @ b in float32."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def accumulate(values: jax.Array, weights: jax.Array, v_tile: Any, spare: Any) -> jax.Array:
    """values + weights @ v_tile; weights in the type of the tile.

    spare: shared memory for the weights, or None. The interpreter needs it: its matmuls take no operand from
    registers, and no accumulator with a value.
    """
    if spare is not None:
        spare[...] = weights
        plgpu.commit_smem()
        return values + matmul(spare, v_tile)

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, v_tile)

    return pl.run_state(multiply)(plgpu.ACC.init(values))


@dataclass(frozen=True, slots=True)
class PageReader:
    """Copies of key or value tiles from a pool seen as rows `[L * P * K * S, H]`."""

    num_pages: int
    num_kv_heads: int
    page_size: int
    tile: int
    """Keys of a tile: a multiple of the page size, or a fraction of it."""
    is_by_warp: bool = False
    """True if a single warp fetches: Mosaic GPU does not know `multiple_of` there, nor does it need it."""

    @property
    def run(self) -> int:
        """Keys of one copy."""
        return min(self.page_size, self.tile)

    @property
    def copies(self) -> int:
        """Number of copies of one tile."""
        return self.tile // self.run

    def pages(self, table: Any, row: jax.Array, tile: jax.Array, last_page: jax.Array) -> tuple[jax.Array, ...]:
        """Return the page of each copy. After the row's last key it is the last page again, whose rows are then masked."""
        first = tile * self.tile
        return tuple(
            table[row, jnp.minimum((first + i * self.run) // self.page_size, last_page)] for i in range(self.copies)
        )

    def fetch(
        self,
        pool: Any,
        pages: tuple[jax.Array, ...],
        layer: jax.Array,
        head: jax.Array,
        tile: jax.Array,
        target: Any,
        barrier: Any,
    ) -> None:
        """Start one copy per page into `target` `[X, H]`; each arrives at `barrier`."""
        for place, source in self.copies_of(pool, pages, layer, head, tile):
            plgpu.copy_gmem_to_smem(source, target.at[place], barrier)

    def copies_of(
        self, pool: Any, pages: tuple[jax.Array, ...], layer: jax.Array, head: jax.Array, tile: jax.Array
    ) -> Iterator[tuple[Any, Any]]:
        """Give the rows of a tile in shared memory and their source in the pool, page by page."""
        for i, page in enumerate(pages):
            slot = jax.lax.rem(tile * self.tile + i * self.run, self.page_size) if self.run < self.page_size else 0
            start = ((layer * self.num_pages + page) * self.num_kv_heads + head) * self.page_size + slot
            start = start if self.is_by_warp else pl.multiple_of(start, self.run)
            yield pl.ds(i * self.run, self.run), pool.at[pl.ds(start, self.run)]


def anew(index: Any, slot: Any, dim: int) -> Any:
    """`index` of a tile whose place is the same in every step; `slot` is that of the step, and not negative.

    The compiler does not know that it is not, and computes the tile's addresses and descriptors in a step. Known, they
    are dozens of registers, which are not there beside the sums of a large head dimension.
    """
    return index + jnp.minimum(slot, 0) if dim > 128 else index


def operand(scratch: dict[str, Any], ring: str, slot: Any, worker: Any) -> Any:
    """The tile that arrived in a slot of the keys' or values' ring, as it is multiplied."""
    arrived = scratch[f"{ring}_ring"].at[slot]
    if "wide" not in scratch:
        return arrived
    # One for both: the matmul with the keys is done when the values come.
    wide = scratch["wide"].at[anew(worker, slot, arrived.shape[-1])]
    widen(arrived, wide)
    return wide


def widen(narrow: Any, wide: Any) -> None:
    """Write an 8-bit tile [X, H] in the type that is multiplied; exact in bfloat16 and float16."""
    for columns in _pieces(narrow.shape[1]):
        values = plgpu.layout_cast(narrow.at[:, columns][...], plgpu.Layout.WGMMA_UPCAST_2X)
        if narrow.dtype == jnp.float8_e4m3fn:
            values = values.astype(jnp.float16)  # the one conversion that Hopper has
            if wide.dtype != jnp.float16:
                values = values.astype(jnp.float32)
        wide.at[:, columns][...] = values.astype(wide.dtype)
    plgpu.commit_smem()


def put(target: Any, values: jax.Array) -> None:
    """Write part of a tile that is no whole number of swizzles, or numbers in device memory.

    jax 0.12 searches for minutes for a layout in which that is fast, unless an option prevents it; jax 0.11 has no such
    option.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(target, values, optimized=False)
    else:
        target[...] = values


def _pieces(dim: int) -> list[Any]:
    """Columns of whole swizzles at a time: few registers, since accumulators fill most of them."""
    size = _PIECE if dim % _PIECE == 0 else dim
    return [pl.ds(start, size) for start in range(0, dim, size)]


_PIECE = 64
