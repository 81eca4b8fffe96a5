"""Attention over pages by `mma.sync` and `cp.async`, the instructions that every GPU has from compute capability 8.0 on.

Flash-decoding (https://pytorch.org/blog/flash-decoding) with swapped operands: scores are `K Q^T` and results `V^T P^T`,
so that keys, and then the numbers of a head, fill the 64 rows of a matmul, and queries are its columns, as few as 8. A block
is one warpgroup with a ring of tiles of its own; several blocks of a multiprocessor hide each other's waits. A unit of work
is a part of a tile of queries (see `splits`) and a KV head. Another kernel joins the parts (`join_kernel`). Tiles of 8-bit
pools stay so in the ring and are upcast on their way to the tensor cores (see `narrow`).

Letters: G tiles of queries, C columns of a tile, K KV heads, H head dim, M pages per row, R rows of results, U parts, X keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import launch_context
from jaxlib.mlir.dialects import arith, memref
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels import words
from jaxserve_kernels.paged_attention.gpu import MMA_KEYS as KEYS
from jaxserve_kernels.paged_attention.gpu import narrow, row_copies, tiles
from jaxserve_kernels.paged_attention.gpu.splits import SLOT, Parts
from jaxserve_kernels.paged_attention.gpu.tiles import MASKED, PageReader
from jaxserve_kernels.paged_attention.options import Scoring

_ROWS = 64
"""Rows of a warpgroup's matmul."""
_STATS = 128
"""Maxima and sums of a part: one for each thread."""


class QueryTiles(NamedTuple):
    """Tiles of queries of one row each, which become the columns of matmuls."""

    queries: Float[Array, "G K C H"]
    rows: Int[Array, "G"]
    positions: Int[Array, "G"]
    """Position of the first query of each tile."""
    ends: Int[Array, "G"]
    """Keys that the last query of each tile may see; 0 for a tile that is not there."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Compile-time parameters of one launch."""

    columns: int
    """Queries of a tile times heads of a group, padded to a power of two from 8."""
    heads_per_query: int
    """Neighbouring columns that are heads of one query."""
    num_kv_heads: int
    dim: int
    kv_dtype: Any
    reader: PageReader
    scoring: Scoring
    num_parts: int
    """Parts that there is room for."""
    num_slots: int
    """Slots that there is room for, for the results of tiles of segments (see `splits`); 0: those of parts are whole tiles."""
    programs: int
    stages: int

    @property
    def num_programs(self) -> int:
        return min(self.programs, self.num_parts * self.num_kv_heads)

    @property
    def commits(self) -> int:
        """Groups of copies of one tile of keys, or of values."""
        return self.reader.copies

    @property
    def is_narrow(self) -> bool:
        """True if the pool holds 8-bit numbers."""
        return bool(jnp.dtype(self.kv_dtype).itemsize == 1)

    @property
    def rows(self) -> int:
        """Rows of the matmul with values, all of its 64 at a time: those after the numbers of a head are not stored."""
        return -(-self.dim // _ROWS) * _ROWS

    @property
    def swizzle(self) -> int:
        """Swizzle of tiles of keys and values."""
        return _swizzle(self.reader.run, self.dim, self.kv_dtype)

    def key_tiles(self, queries: QueryTiles) -> tuple[Int[Array, "G"], Int[Array, "G"]]:
        """Return the first tile of keys that each tile of queries sees, and their number."""
        first = tiles.lowest_key(self.scoring, queries.positions) // KEYS
        first = jnp.broadcast_to(first, queries.ends.shape)
        return first, jnp.where(queries.ends > 0, -(-queries.ends // KEYS) - first, 0)


def attend(
    kernel: Kernel,
    queries: QueryTiles,
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    parts: Parts,
    of_segments: tuple[Array, ...] = (),
) -> tuple[Float[Array, "..."], Float[Array, "U K 2 C64"]]:
    """Return the results of the parts: weighted values [U, K, C, H], or [K, rows of slots, H], then maxima and sums.

    Parts that do not exist stay unwritten, and so do maxima and sums after those of C columns: a slice without them would be
    a copy. of_segments: columns that count of each tile, and the first slot of each part.
    """
    dtype, dim, columns = queries.queries.dtype, kernel.dim, kernel.columns
    partial = (kernel.num_parts, kernel.num_kv_heads)
    values_shape: tuple[int, ...] = (*partial, columns, dim)
    if kernel.num_slots:
        values_shape = (kernel.num_kv_heads, kernel.num_slots * SLOT, dim)
    k_ring, v_ring = (
        _tiled((kernel.stages, KEYS, width), k_pages.dtype, kernel.swizzle) for width in (dim, kernel.rows)
    )
    q = narrow.as_inputs(queries.queries) if kernel.is_narrow else queries.queries
    launch = plgpu.kernel(
        lambda *refs, **scratch: _body(kernel, _named(kernel, *refs), scratch),
        out_type=(
            jax.ShapeDtypeStruct(values_shape, jnp.float32),
            jax.ShapeDtypeStruct((*partial, _STATS), jnp.float32),
        ),
        grid=(kernel.num_programs,),
        grid_names=("program",),
        scratch_types={
            "q_tile": _tiled((columns, dim), dtype, _swizzle(columns, dim, dtype)),
            "k_ring": k_ring,
            "v_ring": v_ring,
            "weights": plgpu.SMEM((KEYS, columns), dtype)
            if columns == 8
            else _tiled((KEYS, columns), dtype, min(128, 2 * columns)),
            "stats": plgpu.SMEM((2, _STATS // 2), jnp.float32),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )
    rows = (-1, dim)
    where = tiles.whole(jnp.reshape(layer, (1,)), block_tables, queries.rows, queries.positions, queries.ends)
    values, stats = launch(
        q.reshape(rows),
        k_pages.reshape(rows),
        v_pages.reshape(rows),
        *where,
        parts.num_parts,
        parts.rows,
        parts.first_tiles,
        parts.counts,
        *of_segments,
    )
    return values, stats.reshape(*partial, 2, _STATS // 2)


class _Refs(NamedTuple):
    """Operands and results in device memory."""

    q: Any
    k: Any
    v: Any
    layer: Any
    tables: Any
    rows: Any
    positions: Any
    ends: Any
    num_parts: Any
    part_tiles: Any
    part_firsts: Any
    part_counts: Any
    used_columns: Any
    slots: Any
    """These two are None for single queries."""
    out: Any
    stats: Any


def _named(kernel: Kernel, *refs: Any) -> _Refs:
    return _Refs(*refs) if kernel.num_slots else _Refs(*refs[:-2], None, None, *refs[-2:])


class _Unit(NamedTuple):
    """One piece of work: tiles of keys [first, first + count) of a tile of queries, for one KV head."""

    part: Any
    queries: Any
    head: Any
    row: Any
    position: Any
    end: Any
    first: Any
    count: Any


def _swizzle(rows: int, dim: int, dtype: Any) -> int:
    """Return the widest swizzle with which a warpgroup copies `rows` x `dim` numbers: in at least four tiles. See `row_copies`."""
    width = dim * jnp.dtype(dtype).itemsize
    if not _is_power_of_two(dim):
        return row_copies.swizzle(width)
    return int(min(128, width // (1 if rows >= 32 else 2 if rows >= 16 else 4)))


def _transforms(swizzle: int, dtype: Any) -> tuple[Any, ...]:
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return (tiling, plgpu.SwizzleTransform(swizzle)) if swizzle > 16 else (tiling,)


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=_transforms(swizzle, dtype))


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _copy(source: Any, target: Any) -> None:
    """Start a copy into shared memory, a group of its own, by all threads.

    Pallas itself takes another instruction from compute capability 9.0 on, with a barrier.
    """
    dtype = target.dtype
    swizzle = _swizzle(*target.shape, dtype)
    transforms = _transforms(swizzle, dtype)
    if not _is_power_of_two(target.shape[1]):
        row_copies.start(source, target, transforms)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms)))  # type: ignore[untyped-decorator]
    def start(context: Any, source: Any, target: Any) -> None:
        context.async_copy(
            src_ref=source,
            dst_ref=target,
            gmem_transform=mgpu.TileTransform(transforms[0].tiling),
            swizzle=swizzle,
            arrive=False,
            implementation=launch_context.AsyncCopyImplementation.CP_ASYNC,
            oob_mode=launch_context.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    start(source, target)


def _commit_nothing(count: int) -> None:
    """Add empty groups, so that the number of groups after a tile does not depend on the tiles that are left."""

    @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
    def commit(context: Any) -> None:
        for _ in range(count):
            mgpu.utils.nvvm.cp_async_commit_group()

    commit()


def _wait(pending: int) -> None:
    """Wait until all but the last `pending` groups of copies are there, and all threads know it."""

    @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
    def wait(context: Any) -> None:
        context.await_cp_async_copy(pending)

    wait()


def _store_slots(kernel: Kernel, refs: _Refs, unit: _Unit, values: Array, layout: Any) -> None:
    """Write the columns that count, in whole slots."""
    used, slot = refs.used_columns[unit.queries], refs.slots[unit.part]
    for first in range(0, kernel.columns, SLOT):

        @pl.when(first < used)
        def _(first: int = first) -> None:
            target = refs.out.at[unit.head, pl.ds(pl.multiple_of(slot * SLOT + first, SLOT), SLOT)]
            _put_transposed(target, values[:, first : first + SLOT], layout)


def _put_transposed(target: Any, values: Array, layout: Any) -> None:
    """Write the first H rows of values [R, C] to device memory as [C, H]: threads of a warp write whole sectors of a column."""
    dim = target.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))  # type: ignore[untyped-decorator]
    def put(_: Any, target: Any, values: Any) -> None:
        def store(value: Any, place: tuple[Any, Any]) -> None:
            row, column = place
            if values.shape[0] == dim:
                memref.store(value, target, [column, row])
                return
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.utils.c(dim, row.type))):
                memref.store(value, target, [column, row])

        values.foreach(store)

    put(target, values)


def _body(kernel: Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    program = jax.lax.axis_index("program")
    heads = jnp.int32(kernel.num_kv_heads)
    num_units = refs.num_parts[0] * heads
    rounds = jax.lax.div(num_units - program + (kernel.num_programs - 1), jnp.int32(kernel.num_programs))

    def one(turn: Any, _: None) -> None:
        index = turn * kernel.num_programs + program
        part, head = jax.lax.div(index, heads), jax.lax.rem(index, heads)
        queries = refs.part_tiles[part]
        place = refs.rows[queries], refs.positions[queries], refs.ends[queries]
        unit = _Unit(part, queries, head, *place, refs.part_firsts[part], refs.part_counts[part])
        _store(kernel, refs, scratch, unit, *_attend(kernel, refs, scratch, unit))

    jax.lax.fori_loop(0, rounds, one, None)


def _fetch(kernel: Kernel, refs: _Refs, scratch: dict[str, Any], unit: _Unit, i: Any) -> None:
    """Start the copies of tile number i of a unit; groups without a copy if it has no such tile."""
    reader, layer = kernel.reader, refs.layer[0]

    @pl.when(i < unit.count)
    def _() -> None:
        slot = jax.lax.rem(i, jnp.int32(kernel.stages))
        last = jax.lax.div(unit.end - 1, jnp.int32(reader.page_size))
        pages = reader.pages(refs.tables, unit.row, unit.first + i, last)
        for ring, pool in (("k_ring", refs.k), ("v_ring", refs.v)):
            for target, source in reader.copies_of(pool, pages, layer, unit.head, unit.first + i):
                _copy(source, scratch[ring].at[slot, target, pl.ds(0, kernel.dim)])

    @pl.when(i >= unit.count)
    def _() -> None:
        _commit_nothing(2 * kernel.commits)


def _attend(kernel: Kernel, refs: _Refs, scratch: dict[str, Any], unit: _Unit) -> tuple[Array, Array, Array]:
    """Return the weighted values [R, C], maxima [C] and sums [C] of one unit's tiles."""
    columns, stages, commits = kernel.columns, kernel.stages, kernel.commits
    q_tile, dtype = scratch["q_tile"], scratch["q_tile"].dtype
    rhs, acc = plgpu.Layout.MMA_RHS(dtype), plgpu.Layout.MMA_ACC(jnp.float32)
    scoring = kernel.scoring
    if kernel.is_narrow:
        scoring = replace(scoring, scale=scoring.scale * words.factor(kernel.kv_dtype, dtype))
    _wait(0)  # the last unit's tiles are read
    start = (unit.queries * kernel.num_kv_heads + unit.head) * columns
    _copy(refs.q.at[pl.ds(pl.multiple_of(start, columns), columns)], q_tile)
    for i in range(stages - 1):
        _fetch(kernel, refs, scratch, unit, jnp.int32(i))

    def load_queries() -> Array:
        return plgpu.load(q_tile.transpose((1, 0)), layout=rhs)

    is_narrow = columns <= 16
    if is_narrow:  # they stay in registers
        _wait(2 * commits * (stages - 1))
        narrow = load_queries()

    def empty(rows: int, value: float) -> Array:
        return plgpu.layout_cast(jnp.full((rows, columns), value, jnp.float32), acc)

    def step(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, maximum, total = carry
        slot = jax.lax.rem(i, jnp.int32(stages))
        _wait(2 * commits * (stages - 2) + commits)
        _fetch(kernel, refs, scratch, unit, i + (stages - 1))
        keys = _operand(kernel, scratch["k_ring"].at[slot], dtype, is_transposed=False)
        matmuls = plgpu.mma(empty(KEYS, 0.0), keys, narrow if is_narrow else load_queries())
        scores = jnp.where(_visible(kernel, unit, i, acc), tiles.scores(scoring, matmuls), MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(axis=0))
        decay = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - _down(new_maximum, KEYS))
        total = total * decay + weights.sum(axis=0)
        scratch["weights"][...] = weights.astype(dtype)
        _wait(2 * commits * (stages - 1))
        v_tile = _operand(kernel, scratch["v_ring"].at[slot], dtype, is_transposed=True)
        weights = plgpu.load(scratch["weights"], layout=rhs, optimized=False)
        values = plgpu.mma(values * _down(decay, kernel.rows), v_tile, weights)
        return values, new_maximum, total

    def vector(value: float) -> Array:
        return plgpu.layout_cast(jnp.full((columns,), value, jnp.float32), acc.reduce(0))

    return jax.lax.fori_loop(0, unit.count, step, (empty(kernel.rows, 0.0), vector(MASKED), vector(0.0)))


def _operand(kernel: Kernel, tile: Any, dtype: Any, *, is_transposed: bool) -> Array:
    """Return a tile of keys [X, H], or one of values transposed [H, X], as the left operand of a matmul."""
    if kernel.is_narrow:
        load = narrow.values if is_transposed else narrow.keys
        return load(tile, kernel.swizzle, _transforms(kernel.swizzle, tile.dtype), dtype)
    loaded: Array = plgpu.load(tile.transpose((1, 0)) if is_transposed else tile, layout=plgpu.Layout.MMA_LHS(dtype))
    return loaded


def _visible(kernel: Kernel, unit: _Unit, i: Any, layout: Any) -> Array:
    """Return which keys of a tile each column sees: [X, C]."""
    shape, scoring = (KEYS, kernel.columns), kernel.scoring
    keys = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + (unit.first + i) * KEYS
    if kernel.columns < 2 * kernel.heads_per_query:  # one query
        position: Any = unit.position
    else:
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        position = jax.lax.div(column, jnp.int32(kernel.heads_per_query)) + unit.position
    seen = (keys <= position) & (keys < unit.end)
    if scoring.sliding_window is not None:
        seen &= keys > position - scoring.sliding_window
    return seen


def _down(vector: Array, rows: int) -> Array:
    """Return a number per column, as high as the matmul."""
    return jax.lax.broadcast_in_dim(vector, (rows, vector.shape[0]), [1])


def _store(
    kernel: Kernel, refs: _Refs, scratch: dict[str, Any], unit: _Unit, values: Array, maximum: Array, total: Array
) -> None:
    layout = plgpu.Layout.MMA_ACC(jnp.float32)
    if kernel.is_narrow:
        layout = narrow.results_layout()
        values = narrow.in_order(values) * words.factor(kernel.kv_dtype, refs.q.dtype)
    if kernel.num_slots:
        _store_slots(kernel, refs, unit, values, layout)
    else:
        _put_transposed(refs.out.at[unit.part, unit.head], values, layout)
    stats = scratch["stats"]
    columns = pl.ds(0, kernel.columns)
    stats[0, columns], stats[1, columns] = maximum, total
    ours = plgpu.load(stats, layout=plgpu.Layout.WG_STRIDED(stats.shape, vec_size=1))
    refs.stats[unit.part, unit.head] = ours.reshape(-1)
