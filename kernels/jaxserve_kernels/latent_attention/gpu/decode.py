"""Decode attention over latent vectors (MLA) for Hopper: each vector is read once, as the key and the value of all heads.

The design of FlashMLA (https://github.com/deepseek-ai/FlashMLA). Two workers (compute warpgroups) share a tile of up to 64
heads of one row: the sums of 64 x 512 numbers are more registers than one has. The first worker computes scores and their
softmax, and puts weights and decays into shared memory; each worker multiplies the weights with its half of the
values. A third warpgroup fetches tiles of vectors into a ring. The grid is persistent, and a unit of work is a part of a row
(see `splits`) and a tile of heads; another kernel joins the parts (`join_kernel`). A row may be a tile of several tokens of a row
of the page tables (`query_tiles`), with heads of one after those of the one before.

Letters: B rows, N query heads, C tiles of heads, G heads of a tile, W width of a vector, V its first numbers, which are its
value, S slots per page, M pages per row, U parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.latent_attention.gpu import MOST_HEADS, head_tiles
from jaxserve_kernels.latent_attention.gpu.query_tiles import QueryTiles
from jaxserve_kernels.paged_attention.gpu import join_kernel, tiles
from jaxserve_kernels.paged_attention.gpu.splits import Cutting, Parts, make_cutting
from jaxserve_kernels.paged_attention.gpu.tiles import MASKED, PageReader
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import DecodeTuning

_ROWS = MOST_HEADS
"""Rows of a warpgroup's matmul, one for each head. Those without a head hold rubbish that is never read."""
_WORKERS = 2
_COMPUTE_REGISTERS, _FETCH_REGISTERS = 216, 72
"""Per thread of two workers and the fetcher: 2 x 128 x 216 + 128 x 72 are just below the 65,536 of a multiprocessor."""


class _Unit(NamedTuple):
    """One piece of work: tiles [first, first + count) of a row's vectors, for one tile of heads."""

    part: Any
    row: Any
    heads: Any
    first: Any
    count: Any


class _Refs(NamedTuple):
    """Operands and results in device memory."""

    q: Any
    latents: Any
    layer: Any
    tables: Any
    table_rows: Any
    token_counts: Any
    lengths: Any
    num_parts: Any
    part_rows: Any
    part_firsts: Any
    part_counts: Any
    out: Any
    stats: Any


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    num_head_tiles: int
    heads: int
    """Heads of a tile: a multiple of `SUBLANES`."""
    num_tokens: int
    """Tokens whose heads are the heads of a row."""
    heads_of_token: int
    width: int
    value_width: int
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
    def num_programs(self) -> int:
        return min(self.tuning.programs, self.cutting.num_parts * self.num_head_tiles)

    @property
    def half(self) -> int:
        """Columns of the sums that a worker has."""
        return self.value_width // _WORKERS

    @property
    def out_columns(self) -> int:
        """Columns of a worker's sums on their way out: they lie where the queries were, which have half as many bytes each."""
        return next(
            size for size in range(self.half, 0, -32) if self.half % size == 0 and 2 * _WORKERS * size <= self.width
        )

    def unit(self, turn: Any, refs: _Refs) -> _Unit:
        """Return a unit of this program: tiles of heads first, so that those of one part run side by side."""
        index = turn * self.num_programs + jax.lax.axis_index("program")
        part = jax.lax.div(index, jnp.int32(self.num_head_tiles))
        heads = jax.lax.rem(index, jnp.int32(self.num_head_tiles))
        return _Unit(part, refs.part_rows[part], heads, refs.part_firsts[part], refs.part_counts[part])

    def rounds(self, refs: _Refs) -> Any:
        """Return the number of units of this program."""
        left = refs.num_parts[0] * self.num_head_tiles - jax.lax.axis_index("program")
        return jax.lax.div(left + (self.num_programs - 1), jnp.int32(self.num_programs))

    def slot(self, taken: Any) -> Any:
        """Return the place in the ring of a program's tile number `taken`."""
        return jax.lax.rem(taken, jnp.int32(self.tuning.stages))


def decode(
    q: Float[Array, "B N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "_ M"],
    kv_lengths: Int[Array, "B"],
    *,
    value_width: int,
    scoring: Scoring,
    tuning: DecodeTuning,
    segments: QueryTiles | None = None,
    is_emulated: bool = False,
) -> Float[Array, "B N V"]:
    """Return each row's weighted sums of the values of its first `kv_lengths` vectors; zeros for rows of length 0.

    segments: the rows are its tiles; `kv_lengths` are then those of their last tokens.
    """
    num_rows, num_heads, width = q.shape
    num_pages, page_size = pages.shape[1], pages.shape[3]
    num_head_tiles, heads = head_tiles(num_heads)
    num_tokens = 1 if segments is None else segments.size
    table_rows = jnp.arange(num_rows, dtype=jnp.int32) if segments is None else segments.tiles.rows
    token_counts = jnp.ones(num_rows, jnp.int32) if segments is None else segments.tiles.counts
    longest = block_tables.shape[1] * page_size
    kernel = _Kernel(
        num_head_tiles=num_head_tiles,
        heads=heads,
        num_tokens=num_tokens,
        heads_of_token=num_heads // num_tokens,
        width=width,
        value_width=value_width,
        max_pages=block_tables.shape[1],
        reader=PageReader(num_pages, 1, page_size, tuning.tile),
        scoring=scoring,
        tuning=tuning,
        cutting=make_cutting(tuning, num_rows, num_head_tiles, tuning.programs, longest),
        is_narrow=pages.dtype.itemsize == 1,
        is_emulated=is_emulated,
    )
    padded = jnp.pad(q, ((0, 0), (0, num_head_tiles * heads - num_heads), (0, 0)))
    parts = kernel.cutting.cut(jnp.zeros_like(kv_lengths), -(-kv_lengths // tuning.tile))
    queries = padded.reshape(num_rows, num_head_tiles, heads, width)
    where = tiles.whole(jnp.reshape(layer, (1,)), block_tables, table_rows, token_counts, kv_lengths)
    values, stats = _launch(kernel, queries, pages, where, parts)
    joined = join_kernel.join(parts, values, stats, None, q.dtype, typical_parts=kernel.cutting.parallel)
    return joined[:, :num_heads]


def part_bytes(num_rows: int, num_heads: int, value_width: int, longest: int, tuning: DecodeTuning) -> int:
    """Return the bytes of the results of all parts that rows of up to `longest` keys may have."""
    num_head_tiles, heads = head_tiles(num_heads)
    cutting = make_cutting(tuning, num_rows, num_head_tiles, tuning.programs, longest)
    return cutting.num_parts * num_head_tiles * heads * value_width * 4


def _launch(
    kernel: _Kernel,
    q: Float[Array, "B C G W"],
    pages: Num[Array, "L P 1 S W"],
    where: Sequence[Array],
    parts: Parts,
) -> tuple[Float[Array, "U C G V"], Float[Array, "U C 2 G"]]:
    """Return the results of the parts: weighted values, then maxima and sums. Parts that do not exist stay unwritten."""
    partial = (kernel.cutting.num_parts, kernel.num_head_tiles)
    launch = plgpu.kernel(
        lambda *refs, **scratch: _body(kernel, _Refs(*refs), scratch),
        out_type=(
            jax.ShapeDtypeStruct((*partial, kernel.heads, kernel.value_width), jnp.float32),
            jax.ShapeDtypeStruct((*partial, 2, kernel.heads), jnp.float32),
        ),
        grid=(kernel.num_programs,),
        grid_names=("program",),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(kernel, q.dtype, pages.dtype),
        # Reductions of a row are those of four threads, by shuffles.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    of_parts = (parts.num_parts, parts.rows, parts.first_tiles, parts.counts)
    return launch(q, pages.reshape(-1, kernel.width), *where, *of_parts)


def _scratch(kernel: _Kernel, dtype: Any, pool_dtype: Any) -> dict[str, Any]:
    stages, tile = kernel.tuning.stages, kernel.tuning.tile
    both = plgpu.Barrier(num_arrivals=_WORKERS)
    upcast = {"wide": tiles.tiled((1, tile, kernel.width), dtype), "wide_ready": both, "wide_free": both}
    scratch = {
        # The sums of a unit leave through the place of its queries, which are not needed any more.
        "q_or_out": plgpu.RefUnion(
            tiles.tiled((1, _ROWS, kernel.width), dtype),
            (
                tiles.tiled((_WORKERS, _ROWS, kernel.out_columns), jnp.float32),
                plgpu.SMEM((2, _ROWS), jnp.float32),
            ),
        ),
        "ring": tiles.tiled((stages, tile, kernel.width), pool_dtype),
        "weights": tiles.tiled((_ROWS, tile), dtype),
        "decay": plgpu.SMEM((_ROWS,), jnp.float32),
        "q_ready": plgpu.Barrier(),
        "ready": plgpu.Barrier(num_arrivals=kernel.reader.copies, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=stages),
        "weights_ready": plgpu.Barrier(),
        "weights_taken": plgpu.Barrier(),
        "stored": plgpu.Barrier(),
    }
    return scratch | upcast if kernel.is_narrow else scratch


def _body(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        _work_with_scores(kernel, refs, scratch)

    @pl.when(warpgroup == 1)
    def _() -> None:
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        _work_with_weights(kernel, refs, scratch)

    @pl.when(warpgroup == _WORKERS)
    def _() -> None:
        plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
        _fetch(kernel, refs, scratch)


def _work_with_scores(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    """Do the first worker's share of the program's units; `done` counts the tiles of the units before."""
    q_tile, _sums = scratch["q_or_out"]

    def one(turn: Any, done: Any) -> Any:
        unit = kernel.unit(turn, refs)
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(scratch["stored"]))
        source = refs.q.at[unit.row, unit.heads]
        plgpu.copy_gmem_to_smem(source, q_tile.at[0, pl.ds(0, kernel.heads)], scratch["q_ready"])
        plgpu.barrier_wait(scratch["q_ready"])
        values, maximum, total = _attend(kernel, refs, scratch, unit, done)
        _store_stats(kernel, refs, scratch, unit, maximum, total)
        _store(kernel, refs, scratch, unit, 0, values)
        return done + unit.count

    rounds = kernel.rounds(refs)
    jax.lax.fori_loop(0, rounds, one, jnp.int32(0))

    @pl.when(rounds > 0)
    def drain() -> None:  # every arrival is waited for before the barriers go
        plgpu.barrier_wait(scratch["stored"])
        plgpu.barrier_wait(scratch["weights_taken"])
        if kernel.is_narrow:
            plgpu.barrier_wait(scratch["wide_free"])


def _attend(
    kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], unit: _Unit, done: Any
) -> tuple[Array, Array, Array]:
    """Return the first half of the weighted values, the maximum and the sum of one unit's tiles."""
    q_tile, _ = scratch["q_or_out"]
    tile, ends = kernel.tuning.tile, _ends(kernel, refs, unit)

    def step(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, maximum, total = carry
        vectors = _arrived(kernel, scratch, done + i, worker=0)
        queries = q_tile.at[tiles.anew(0, kernel.slot(done + i), kernel.width)]
        scores = tiles.scores(kernel.scoring, tiles.matmul(queries, vectors.transpose((1, 0))))
        keys = (unit.first + i) * tile + tiles.iota((_ROWS, tile), 1)
        scores = jnp.where(keys < ends, scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        decay = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - tiles.across(new_maximum, tile))
        total = total * decay + weights.sum(axis=1)
        pl.when(done + i > 0)(lambda: plgpu.barrier_wait(scratch["weights_taken"]))
        scratch["weights"][...] = weights.astype(q_tile.dtype)
        scratch["decay"][...] = decay
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["weights_ready"])
        values = _accumulate(kernel, scratch, values, decay, vectors.at[:, pl.ds(0, kernel.half)])
        _leave(kernel, scratch, done + i)
        return values, new_maximum, total

    start = tiles.zeros(_ROWS, kernel.half), tiles.row_vector(MASKED, _ROWS), tiles.row_vector(0.0, _ROWS)
    return jax.lax.fori_loop(0, unit.count, step, start)


def _ends(kernel: _Kernel, refs: _Refs, unit: _Unit) -> Any:
    """Return the end of the keys that each row of the matmul sees: of one token before another it is one less."""
    end = refs.lengths[unit.row]
    if kernel.num_tokens == 1:
        return end
    token = jax.lax.div(tiles.row_numbers(_ROWS), jnp.int32(kernel.heads_of_token))
    later = jnp.maximum(refs.token_counts[unit.row] - 1 - token, 0)
    return tiles.across(end - later, kernel.tuning.tile)


def _work_with_weights(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    """Do the second worker's share of the program's units: its half of the weighted values."""

    def one(turn: Any, done: Any) -> Any:
        unit = kernel.unit(turn, refs)

        def step(i: Any, values: Array) -> Array:
            vectors = _arrived(kernel, scratch, done + i, worker=1)
            plgpu.barrier_wait(scratch["weights_ready"])
            decay = plgpu.load(scratch["decay"], layout=plgpu.Layout.WGMMA.reduce(1))
            values = _accumulate(kernel, scratch, values, decay, vectors.at[:, pl.ds(kernel.half, kernel.half)])
            plgpu.barrier_arrive(scratch["weights_taken"])
            _leave(kernel, scratch, done + i)
            return values

        values = jax.lax.fori_loop(0, unit.count, step, tiles.zeros(_ROWS, kernel.half))
        # The queries are not read any more: the last weights were made of them.
        _store(kernel, refs, scratch, unit, 1, values)
        plgpu.barrier_arrive(scratch["stored"])
        return done + unit.count

    rounds = kernel.rounds(refs)
    jax.lax.fori_loop(0, rounds, one, jnp.int32(0))
    if kernel.is_narrow:
        pl.when(rounds > 0)(lambda: plgpu.barrier_wait(scratch["wide_free"]))


def _arrived(kernel: _Kernel, scratch: dict[str, Any], taken: Any, worker: int) -> Any:
    """Return a program's tile number `taken`, as it is multiplied, when it has arrived. 8-bit tiles: each worker upcasts a half."""
    slot = kernel.slot(taken)
    plgpu.barrier_wait(scratch["ready"].at[slot])
    arrived = scratch["ring"].at[slot]
    if not kernel.is_narrow:
        return arrived
    wide = scratch["wide"].at[tiles.anew(0, slot, kernel.width)]
    pl.when(taken > 0)(lambda: plgpu.barrier_wait(scratch["wide_free"]))
    columns = pl.ds(0, kernel.width - kernel.half) if worker == 0 else pl.ds(kernel.width - kernel.half, kernel.half)
    tiles.widen(arrived.at[:, columns], wide.at[:, columns])
    plgpu.barrier_arrive(scratch["free"].at[slot])
    plgpu.barrier_arrive(scratch["wide_ready"])
    plgpu.barrier_wait(scratch["wide_ready"])
    return wide


def _leave(kernel: _Kernel, scratch: dict[str, Any], taken: Any) -> None:
    """Say that a worker needs the place of a program's tile number `taken` no more."""
    plgpu.barrier_arrive(scratch["wide_free"] if kernel.is_narrow else scratch["free"].at[kernel.slot(taken)])


def _accumulate(kernel: _Kernel, scratch: dict[str, Any], values: Array, decay: Array, vectors: Any) -> Array:
    """Return the sums with those of one more tile of vectors."""
    weights = scratch["weights"]
    values = values * tiles.across(decay, kernel.half)
    if kernel.is_emulated:  # the interpreter has no accumulator with a value
        return values + tiles.matmul(weights, vectors)

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, weights, vectors)

    summed: Array = pl.run_state(multiply)(plgpu.ACC.init(values))
    return summed


def _store_stats(
    kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], unit: _Unit, maximum: Array, total: Array
) -> None:
    _, (_, stats) = scratch["q_or_out"]
    stats[0], stats[1] = maximum, total
    plgpu.commit_smem()
    for i in range(2):  # what is copied has to be contiguous
        plgpu.copy_smem_to_gmem(stats.at[i, pl.ds(0, kernel.heads)], refs.stats.at[unit.part, unit.heads, i])


def _store(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], unit: _Unit, worker: int, values: Array) -> None:
    """Write a worker's half of a unit's result."""
    _, (out, _) = scratch["q_or_out"]
    width, piece = kernel.out_columns, out.at[worker]
    for start in range(0, kernel.half, width):
        plgpu.wait_smem_to_gmem(0)
        piece[...] = values[:, start : start + width]
        plgpu.commit_smem()
        columns = pl.ds(worker * kernel.half + start, width)
        plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, kernel.heads)], refs.out.at[unit.part, unit.heads, :, columns])
    plgpu.wait_smem_to_gmem(0)


def _fetch(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    """Keep the ring full."""
    reader, layer, stages = kernel.reader, refs.layer[0], kernel.tuning.stages

    def one(turn: Any, done: Any) -> Any:
        unit = kernel.unit(turn, refs)
        last_page = jax.lax.div(refs.lengths[unit.row] - 1, jnp.int32(reader.page_size))
        last_page = jnp.minimum(last_page, kernel.max_pages - 1)
        table_row = refs.table_rows[unit.row]

        def step(i: Any, pages: tuple[Array, ...]) -> tuple[Array, ...]:
            tile = unit.first + i
            following = reader.pages(refs.tables, table_row, tile + 1, last_page)  # the copies hide their latency
            taken = done + i
            slot = kernel.slot(taken)
            pl.when(taken >= stages)(lambda: plgpu.barrier_wait(scratch["free"].at[slot]))
            target, barrier = scratch["ring"].at[slot], scratch["ready"].at[slot]
            reader.fetch(refs.latents, pages, layer, jnp.int32(0), tile, target, barrier)
            return following

        first = reader.pages(refs.tables, table_row, unit.first, last_page)
        jax.lax.fori_loop(0, unit.count, step, first)
        return done + unit.count

    def drain(i: Any, _: None) -> None:  # every arrival is waited for before the barriers go
        plgpu.barrier_wait(scratch["free"].at[kernel.slot(i)])

    done = jax.lax.fori_loop(0, kernel.rounds(refs), one, jnp.int32(0))
    jax.lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)
