"""Decode attention for Hopper: one query token per row, its keys split over workers.

Flash-decoding (https://pytorch.org/blog/flash-decoding) with a row's query group in the rows of one tensor-core
matmul. The grid is persistent: each program has two workers (compute warpgroups, each with its own ring of key and
value tiles) and one warpgroup that fetches for both. A unit of work is a part of a row (see `splits`) and a kv head; another
kernel joins the parts (`join_kernel`).

Letters: B rows, N query heads, K kv heads, G = N / K, H head dim, S slots per page, M pages per row, U parts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.paged_attention.gpu import join_kernel, tiles
from jaxserve_kernels.paged_attention.gpu.join import join
from jaxserve_kernels.paged_attention.gpu.splits import Cutting, Parts, make_cutting
from jaxserve_kernels.paged_attention.gpu.tiles import MASKED, PageReader
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import DecodeTuning

_ROWS = 64
"""Rows of a warpgroup's matmul. The heads of a group fill some of them; the others hold rubbish that is never read."""
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 216, 72
"""Per thread of two workers and the fetcher: 2 x 128 x 216 + 128 x 72 are just below the 65,536 of a multiprocessor."""


class _Unit(NamedTuple):
    """One piece of work: tiles [first, first + count) of a row, for one kv head; `part` is where its result goes."""

    part: Any
    row: Any
    head: Any
    first: Any
    count: Any


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    num_rows: int
    num_kv_heads: int
    group: int
    dim: int
    max_pages: int
    reader: PageReader
    scoring: Scoring
    tuning: DecodeTuning
    cutting: Cutting
    is_narrow: bool
    """True if the pool holds 8-bit numbers."""
    is_emulated: bool
    """True if the interpreter runs it."""

    @property
    def workers(self) -> int:
        return num_workers(self.dim)

    @property
    def num_programs(self) -> int:
        return min(self.tuning.programs, pl.cdiv(self.cutting.num_parts * self.num_kv_heads, self.workers))

    @property
    def out_columns(self) -> int:
        """Columns of a part of the result on its way out: few if little memory is left."""
        return next(size for size in range(32 if self.dim > 128 else 64, 0, -8) if self.dim % size == 0)

    def unit(self, index: Any, refs: _Refs) -> _Unit:
        """Return unit number `index`: heads first, so that those of one part run side by side."""
        part, head = jax.lax.div(index, jnp.int32(self.num_kv_heads)), jax.lax.rem(index, jnp.int32(self.num_kv_heads))
        is_there = part < refs.num_parts[0]
        part = jnp.where(is_there, part, 0)
        count = jnp.where(is_there, refs.part_counts[part], 0)
        return _Unit(part, refs.part_rows[part], head, refs.part_firsts[part], count)

    def tiles_of(self, lengths: Int[Array, "B"]) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """Return each row's first tile, and its number of tiles."""
        first = tiles.lowest_key(self.scoring, lengths - 1) // self.reader.tile
        return jnp.broadcast_to(first, lengths.shape), -(-lengths // self.reader.tile) - first

    def rounds(self, program: Any, refs: _Refs) -> Any:
        """Return the units of each worker of a program; some of the last ones are empty."""
        num_units = refs.num_parts[0] * self.num_kv_heads
        turns = jax.lax.div(num_units + (self.workers - 1), jnp.int32(self.workers))
        return jax.lax.div(turns - program + (self.num_programs - 1), jnp.int32(self.num_programs))

    def index(self, program: Any, turn: Any, worker: Any) -> Any:
        return (turn * self.num_programs + program) * self.workers + worker


def decode(
    q: Float[Array, "B N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None,
    tuning: DecodeTuning,
    is_emulated: bool = False,
) -> Float[Array, "B N H"]:
    """Attend; zeros for rows of length 0."""
    num_rows, num_heads, dim = q.shape
    num_pages, num_kv_heads, page_size = k_pages.shape[1:4]
    group = num_heads // num_kv_heads
    kernel = _Kernel(
        num_rows=num_rows,
        num_kv_heads=num_kv_heads,
        group=group,
        dim=dim,
        max_pages=block_tables.shape[1],
        reader=PageReader(num_pages, num_kv_heads, page_size, tuning.tile),
        scoring=scoring,
        tuning=tuning,
        cutting=make_cutting(
            tuning, num_rows, num_kv_heads, tuning.programs * num_workers(dim), block_tables.shape[1] * page_size
        ),
        is_narrow=k_pages.dtype.itemsize == 1,
        is_emulated=is_emulated,
    )
    grouped = jnp.pad(q.reshape(num_rows, num_kv_heads, group, dim), ((0, 0), (0, 0), (0, -group % _SUBLANES), (0, 0)))
    parts = kernel.cutting.cut(*kernel.tiles_of(kv_lengths))
    values, stats = _launch(kernel, grouped, k_pages, v_pages, layer, block_tables, kv_lengths, parts)
    if join_kernel.has_kernel(num_heads, dim):
        return join_kernel.join(parts, values, stats, sinks, q.dtype, typical_parts=kernel.cutting.parallel)
    shape = (num_rows, num_kv_heads, group, dim)
    return join(parts, kernel.cutting.most_parts, values.__getitem__, stats, sinks, shape).astype(q.dtype)


def num_workers(dim: int) -> int:
    """Return the workers of a program. One if the sums of 64 x 256 results need nearly all registers a thread can have."""
    return 1 if dim > 128 else 2


_SUBLANES = 8
"""Rows of a tile in shared memory: copies move whole tiles."""


def _launch(
    kernel: _Kernel,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    layer: Array,
    block_tables: Array,
    kv_lengths: Array,
    parts: Parts,
) -> tuple[Float[Array, "U K G H"], Float[Array, "U K 2 G8"]]:
    """Return the results of the parts: weighted values, then maxima and sums. Parts that do not exist stay unwritten."""
    workers, stages, tile, dim = kernel.workers, kernel.tuning.stages, kernel.tuning.tile, kernel.dim
    dtype, padded_group = q.dtype, q.shape[2]
    partial = (kernel.cutting.num_parts, kernel.num_kv_heads)
    ring = plgpu.Barrier(num_barriers=workers * stages)
    filled = plgpu.Barrier(num_arrivals=kernel.reader.copies, num_barriers=workers * stages)
    scratch = {
        "q_tile": tiles.tiled((workers, _ROWS, dim), dtype),
        "k_ring": tiles.tiled((workers * stages, tile, dim), k_pages.dtype),
        "v_ring": tiles.tiled((workers * stages, tile, dim), v_pages.dtype),
        "out_tile": plgpu.SMEM((workers, _ROWS, kernel.out_columns), jnp.float32),
        "stats": plgpu.SMEM((workers, 2, _ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_barriers=workers),
        "k_ready": filled,
        "v_ready": filled,
        "k_free": ring,
        "v_free": ring,
    }
    if kernel.is_narrow:
        scratch["wide"] = tiles.tiled((workers, tile, dim), dtype)
    if kernel.is_emulated:
        scratch["weights"] = tiles.tiled((workers, _ROWS, tile), dtype)
    launch = plgpu.kernel(
        lambda *refs, **scratch_refs: _body(kernel, _Refs(*refs), scratch_refs),
        out_type=(
            jax.ShapeDtypeStruct((*partial, kernel.group, dim), jnp.float32),
            jax.ShapeDtypeStruct((*partial, 2, padded_group), jnp.float32),
        ),
        grid=(kernel.num_programs,),
        grid_names=("program",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    rows = (-1, dim)
    where = tiles.whole(jnp.reshape(layer, (1,)), block_tables, kv_lengths)
    return launch(
        q,
        k_pages.reshape(rows),
        v_pages.reshape(rows),
        *where,
        parts.num_parts,
        parts.rows,
        parts.first_tiles,
        parts.counts,
    )


class _Refs(NamedTuple):
    """Operands and results in device memory."""

    q: Any
    k: Any
    v: Any
    layer: Any
    tables: Any
    lengths: Any
    num_parts: Any
    part_rows: Any
    part_firsts: Any
    part_counts: Any
    out: Any
    stats: Any


def _body(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup < kernel.workers)
    def _() -> None:
        if kernel.workers > 1:
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        _work(kernel, refs, scratch, warpgroup)

    @pl.when(warpgroup == kernel.workers)
    def _() -> None:
        if kernel.workers > 1:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
        _fetch(kernel, refs, scratch)


def _work(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], worker: Any) -> None:
    """A worker's units, one after the other; `done` counts the tiles it has taken from its ring."""
    program = jax.lax.axis_index("program")

    def one(turn: Any, done: Any) -> Any:
        unit = kernel.unit(kernel.index(program, turn, worker), refs)

        @pl.when(unit.count > 0)
        def _() -> None:
            source = refs.q.at[unit.row, unit.head]
            target = scratch["q_tile"].at[worker]
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(0, source.shape[0])], scratch["q_ready"].at[worker])
            plgpu.barrier_wait(scratch["q_ready"].at[worker])
            _store(kernel, refs, scratch, worker, unit, *_attend(kernel, refs, scratch, worker, unit, done))

        return done + unit.count

    jax.lax.fori_loop(0, kernel.rounds(program, refs), one, jnp.int32(0))


def _attend(
    kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], worker: Any, unit: _Unit, done: Any
) -> tuple[Array, Array, Array]:
    """Weighted values, maximum and sum of one unit's tiles."""
    tile, stages = kernel.tuning.tile, kernel.tuning.stages
    q_tile = scratch["q_tile"].at[worker]
    spare = scratch["weights"].at[worker] if kernel.is_emulated else None
    end = refs.lengths[unit.row]
    lowest = tiles.lowest_key(kernel.scoring, end - 1)

    def step(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, maximum, total = carry
        slot = worker * stages + jax.lax.rem(done + i, jnp.int32(stages))
        first = (unit.first + i) * tile
        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        k_tile = tiles.operand(scratch, "k", slot, worker)
        scores = tiles.scores(kernel.scoring, tiles.matmul(q_tile, k_tile.transpose((1, 0))))
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        keys = first + tiles.iota((_ROWS, tile), 1)
        scores = jnp.where((keys >= lowest) & (keys < end), scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        decay = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - tiles.across(new_maximum, tile))
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(q_tile.dtype)  # half the registers, before the values come
        values = values * tiles.across(decay, kernel.dim)
        plgpu.barrier_wait(scratch["v_ready"].at[slot])
        v_tile = tiles.operand(scratch, "v", slot, worker)
        values = tiles.accumulate(values, weights, v_tile, spare)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return values, new_maximum, total

    start = tiles.zeros(_ROWS, kernel.dim), tiles.row_vector(MASKED, _ROWS), tiles.row_vector(0.0, _ROWS)
    return jax.lax.fori_loop(0, unit.count, step, start)


def _store(
    kernel: _Kernel,
    refs: _Refs,
    scratch: dict[str, Any],
    worker: Any,
    unit: _Unit,
    values: Array,
    maximum: Array,
    total: Array,
) -> None:
    where = (unit.part, unit.head)
    stats, out_tile = scratch["stats"].at[worker], scratch["out_tile"].at[worker]
    stats[0], stats[1] = maximum, total
    plgpu.commit_smem()
    for i in range(2):  # what is copied has to be contiguous
        plgpu.copy_smem_to_gmem(stats.at[i, pl.ds(0, refs.stats.shape[-1])], refs.stats.at[(*where, i)])
    width = kernel.out_columns
    for start in range(0, kernel.dim, width):
        plgpu.wait_smem_to_gmem(0)
        out_tile[...] = values[:, start : start + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            out_tile.at[pl.ds(0, kernel.group)], refs.out.at[(*where, slice(None), pl.ds(start, width))]
        )
    plgpu.wait_smem_to_gmem(0)


def _fetch(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    """Keep both workers' rings full."""
    program, layer = jax.lax.axis_index("program"), refs.layer[0]
    stages, reader = kernel.tuning.stages, kernel.reader

    def pages(unit: _Unit, i: Any) -> tuple[Array, ...]:
        row = jnp.where(unit.count > 0, unit.row, 0)
        last = jnp.minimum(jax.lax.div(jnp.maximum(refs.lengths[row] - 1, 0), reader.page_size), kernel.max_pages - 1)
        return reader.pages(refs.tables, row, unit.first + i, last)

    def round_of(turn: Any, done: tuple[Any, ...]) -> tuple[Any, ...]:
        units = [kernel.unit(kernel.index(program, turn, worker), refs) for worker in range(kernel.workers)]

        def step(i: Any, known: tuple[tuple[Array, ...], ...]) -> tuple[tuple[Array, ...], ...]:
            following = tuple(pages(unit, i + 1) for unit in units)  # the copies hide their latency
            for worker, unit in enumerate(units):

                @pl.when(i < unit.count)
                def _(worker: int = worker, unit: _Unit = unit) -> None:
                    taken = done[worker] + i
                    slot = worker * stages + jax.lax.rem(taken, jnp.int32(stages))
                    for ring in ("k", "v"):

                        @pl.when(taken >= stages)
                        def _(ring: str = ring) -> None:
                            plgpu.barrier_wait(scratch[f"{ring}_free"].at[slot])

                        reader.fetch(
                            getattr(refs, ring),
                            known[worker],
                            layer,
                            unit.head,
                            unit.first + i,
                            scratch[f"{ring}_ring"].at[slot],
                            scratch[f"{ring}_ready"].at[slot],
                        )

            return following

        most = functools.reduce(jnp.maximum, (unit.count for unit in units))
        jax.lax.fori_loop(0, most, step, tuple(pages(unit, jnp.int32(0)) for unit in units))
        return tuple(before + unit.count for before, unit in zip(done, units, strict=True))

    done = jax.lax.fori_loop(0, kernel.rounds(program, refs), round_of, (jnp.int32(0),) * kernel.workers)
    for worker in range(kernel.workers):  # every arrival is waited for before the barriers go

        def drain(i: Any, _: None, worker: int = worker) -> None:
            slot = worker * stages + jax.lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(scratch["k_free"].at[slot])
            plgpu.barrier_wait(scratch["v_free"].at[slot])

        jax.lax.fori_loop(jnp.maximum(done[worker] - stages, 0), done[worker], drain, None)
