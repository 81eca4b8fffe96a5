"""Attention of query segments for Hopper: prompts, chunks of prompts, and what follows a cached prefix.

FlashAttention-3 (arXiv 2407.08608) over pages: a program takes tiles of 128 queries of one head, two warpgroups with
64 queries each take turns on the tensor cores, a third fetches keys and values for both. The grid is persistent and
takes the tiles with the most keys first. Keys that every query of a warpgroup sees are not masked.

Letters: T tokens, B rows, N query heads, K kv heads, H head dim, S slots per page, M pages per row, Q tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.paged_attention.gpu import tiles
from jaxserve_kernels.paged_attention.gpu.tiles import MASKED, PageReader
from jaxserve_kernels.paged_attention.layout import Ragged
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import PrefillTuning

QUERIES_PER_TILE = 128
ALIGNMENT = 8
"""Alignment of a tile's first token: shared memory is laid out in tiles of 8 rows."""
_WORKERS = 2
_ROWS = QUERIES_PER_TILE // _WORKERS
_FETCHER = _WORKERS
_PIECE = 64
"""Columns of a ragged result on their way out: whole 128-byte lines."""


class _Unit(NamedTuple):
    """A tile of queries of one head, and the key tiles [first, last) that any of its queries sees."""

    head: Any
    row: Any
    token: Any
    """First token of the tile."""
    begin: Any
    end: Any
    """The row's own tokens in the tile: [begin, end)."""
    offset: Any
    """Position of a token minus its place on the token axis."""
    first: Any
    last: Any


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    num_heads: int
    num_kv_heads: int
    dim: int
    max_pages: int
    reader: PageReader
    scoring: Scoring
    tuning: PrefillTuning
    has_sinks: bool
    is_narrow: bool
    is_emulated: bool

    @property
    def padded_dim(self) -> int:
        return -(-self.dim // _PIECE) * _PIECE

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that computes, and of one that fetches: 2 x 128 x 240 + 128 x 24 are below the 65,536 there are."""
        return (240, 24) if self.dim > 128 else (232, 40)

    def rounds(self, program: Any, refs: tiles.SegmentRefs) -> Any:
        """Units that a program does."""
        programs = self.tuning.programs
        return jax.lax.div(refs.num_tiles[0] * self.num_heads - program + (programs - 1), jnp.int32(programs))

    def unit(self, program: Any, turn: Any, refs: tiles.SegmentRefs) -> _Unit:
        """Heads first, so that those which share keys run side by side; the last tiles, with most keys, first."""
        index = turn * self.tuning.programs + program
        tile = refs.num_tiles[0] - 1 - jax.lax.div(index, jnp.int32(self.num_heads))
        row, token = refs.tile_rows[tile], pl.multiple_of(refs.tile_starts[tile], ALIGNMENT)
        row_end = refs.query_starts[row + 1]
        begin = jnp.maximum(token, refs.query_starts[row])
        end = jnp.minimum(token + QUERIES_PER_TILE, row_end)
        offset = refs.lengths[row] - row_end
        first = jax.lax.div(tiles.lowest_key(self.scoring, begin + offset), jnp.int32(self.tuning.tile))
        last = jax.lax.div(end + offset + (self.tuning.tile - 1), jnp.int32(self.tuning.tile))
        return _Unit(jax.lax.rem(index, jnp.int32(self.num_heads)), row, token, begin, end, offset, first, last)


def prefill(
    q: Float[Array, "T N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None,
    tuning: PrefillTuning,
    is_emulated: bool = False,
) -> Float[Array, "T N H"]:
    """Attention of the tokens that `ragged`'s tiles cover; the others' results are what the memory held."""
    num_tokens, num_heads, dim = q.shape
    num_pages, num_kv_heads, page_size = k_pages.shape[1:4]
    kernel = _Kernel(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dim=dim,
        max_pages=block_tables.shape[1],
        reader=PageReader(num_pages, num_kv_heads, page_size, tuning.tile),
        scoring=scoring,
        tuning=tuning,
        has_sinks=sinks is not None,
        is_narrow=k_pages.dtype.itemsize == 1,
        is_emulated=is_emulated,
    )
    num_rows = num_tokens + -num_tokens % ALIGNMENT  # bulk copies take whole tiles of the memory's rows
    tail = num_rows - num_tokens + QUERIES_PER_TILE  # the last tile may end there
    padded = jnp.pad(q.reshape(num_tokens, num_heads * dim), ((0, tail), (0, 0)))
    launch = plgpu.kernel(
        lambda *refs, **scratch: _body(kernel, tiles.SegmentRefs(*refs), scratch),
        out_type=jax.ShapeDtypeStruct((num_rows, num_heads * kernel.padded_dim), q.dtype),
        grid=(tuning.programs,),
        grid_names=("program",),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(kernel, q.dtype, k_pages.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out = launch(
        padded,
        k_pages.reshape(-1, dim),
        v_pages.reshape(-1, dim),
        *tiles.whole(layer.reshape(1), block_tables, kv_lengths, ragged.query_starts),
        *tiles.whole(ragged.tile_rows, ragged.tile_starts, ragged.num_tiles.reshape(1)),
        jnp.zeros(num_heads) if sinks is None else sinks.astype(jnp.float32),
    )
    return out.reshape(num_rows, num_heads, kernel.padded_dim)[:num_tokens, :, :dim]


def _scratch(kernel: _Kernel, dtype: Any, pool_dtype: Any) -> dict[str, Any]:
    stages, tile, dim = kernel.tuning.stages, kernel.tuning.tile, kernel.dim
    filled = plgpu.Barrier(num_arrivals=kernel.reader.copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=stages)
    scratch = {
        "q_tile": tiles.tiled((_WORKERS, _ROWS, dim), dtype),  # and the result on its way out
        "k_ring": tiles.tiled((stages, tile, dim), pool_dtype),
        "v_ring": tiles.tiled((stages, tile, dim), pool_dtype),
        "piece": plgpu.SMEM((_WORKERS, _ROWS, _PIECE), dtype),
        "q_ready": plgpu.Barrier(num_barriers=_WORKERS),
        "k_ready": filled,
        "v_ready": filled,
        "k_free": free,
        "v_free": free,
        "turn": plgpu.Barrier(num_arrivals=_WORKERS),
    }
    if kernel.is_narrow:
        scratch["wide"] = tiles.tiled((_WORKERS, tile, dim), dtype)
    if kernel.is_emulated:
        scratch["weights"] = tiles.tiled((_WORKERS, _ROWS, tile), dtype)
    return scratch


def _body(kernel: _Kernel, refs: tiles.SegmentRefs, scratch: dict[str, Any]) -> None:
    warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")
    rounds = kernel.rounds(program, refs)
    compute, fetch = kernel.registers

    @pl.when(warpgroup < _WORKERS)
    def _() -> None:
        plgpu.set_max_registers(compute, action="increase")

        def one(turn: Any, done: Any) -> Any:
            unit = kernel.unit(program, turn, refs)
            _work(kernel, refs, scratch, warpgroup, unit, done)
            return done + (unit.last - unit.first)

        jax.lax.fori_loop(0, rounds, one, jnp.int32(0))

    @pl.when(warpgroup == _FETCHER)
    def _() -> None:
        plgpu.set_max_registers(fetch, action="decrease")

        def one(turn: Any, done: Any) -> Any:
            unit = kernel.unit(program, turn, refs)
            _fetch(kernel, refs, scratch, unit, done)
            return done + (unit.last - unit.first)

        done = jax.lax.fori_loop(0, rounds, one, jnp.int32(0))
        _drain(kernel, scratch, done)


def _pass_turn(scratch: dict[str, Any]) -> None:
    """Meet the other worker: one leaves the tensor cores while the other enters them."""
    plgpu.barrier_arrive(scratch["turn"])
    plgpu.barrier_wait(scratch["turn"])


def _work(
    kernel: _Kernel, refs: tiles.SegmentRefs, scratch: dict[str, Any], worker: Any, unit: _Unit, done: Any
) -> None:
    """One worker's half of a tile; `done` counts the key tiles of the units before."""
    tile, stages = kernel.tuning.tile, kernel.tuning.stages
    token = pl.multiple_of(unit.token + worker * _ROWS, ALIGNMENT)
    position = token + unit.offset
    begin, end = jnp.maximum(unit.begin, token), jnp.minimum(unit.end, token + _ROWS)
    q_tile = scratch["q_tile"].at[worker]
    plgpu.copy_gmem_to_smem(
        refs.q.at[pl.ds(token, _ROWS), pl.ds(unit.head * kernel.dim, kernel.dim)], q_tile, scratch["q_ready"].at[worker]
    )
    plgpu.barrier_wait(scratch["q_ready"].at[worker])

    def step(i: Any, carry: tuple[Array, Array, Array], *, is_masked: bool) -> tuple[Array, Array, Array]:
        values, maximum, total = carry
        slot = jax.lax.rem(done + i - unit.first, jnp.int32(stages))
        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        k_tile = tiles.operand(scratch, "k", slot, worker)

        def multiply(accumulator: Any) -> Array:
            queries = scratch["q_tile"].at[tiles.anew(worker, slot, kernel.dim)]
            plgpu.wgmma(accumulator, queries, k_tile.transpose((1, 0)))
            _pass_turn(scratch)
            return accumulator[...]

        matmuls = pl.run_scoped(multiply, plgpu.ACC((_ROWS, tile), jnp.float32))
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        scores = tiles.scores(kernel.scoring, matmuls)
        if is_masked:
            scores = jnp.where(_visible(kernel, position, i * tile), scores, MASKED)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        decay = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - tiles.across(new_maximum, tile))
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(q_tile.dtype)  # half the registers, before the values come
        values = values * tiles.across(decay, kernel.dim)
        plgpu.barrier_arrive(scratch["turn"])
        plgpu.barrier_wait(scratch["v_ready"].at[slot])
        v_tile = tiles.operand(scratch, "v", slot, worker)
        plgpu.barrier_wait(scratch["turn"])
        spare = scratch["weights"].at[worker] if kernel.is_emulated else None
        values = tiles.accumulate(values, weights, v_tile, spare)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return values, new_maximum, total

    def skip(i: Any, _: None) -> None:
        """A key tile that only the other worker's queries see."""
        slot = jax.lax.rem(done + i - unit.first, jnp.int32(stages))
        for ring in ("k", "v"):
            plgpu.barrier_wait(scratch[f"{ring}_ready"].at[slot])
            plgpu.barrier_arrive(scratch[f"{ring}_free"].at[slot])
            _pass_turn(scratch)

    # Tiles up to `open_from` and from `open_to` on hold keys that some of the 64 queries must not see.
    newest = position + _ROWS - 1
    last = jnp.where(begin < end, jax.lax.div(end + unit.offset + (tile - 1), jnp.int32(tile)), unit.first)
    last = jnp.clip(last, unit.first, unit.last)
    open_to = jnp.clip(jax.lax.div(position + 1, jnp.int32(tile)), unit.first, last)
    open_from = jnp.clip(
        jax.lax.div(tiles.lowest_key(kernel.scoring, newest) + (tile - 1), jnp.int32(tile)), unit.first, open_to
    )
    if kernel.scoring.sliding_window is None:
        open_from = unit.first
    pl.when(worker == 1)(lambda: _pass_turn(scratch))  # half a step after the other
    carry = tiles.zeros(_ROWS, kernel.dim), tiles.row_vector(MASKED, _ROWS), tiles.row_vector(0.0, _ROWS)

    def masked(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return step(i, carry, is_masked=True)

    def unmasked(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return step(i, carry, is_masked=False)

    if kernel.scoring.sliding_window is not None:
        carry = jax.lax.fori_loop(unit.first, open_from, masked, carry)
    carry = jax.lax.fori_loop(open_from, open_to, unmasked, carry)
    values, maximum, total = jax.lax.fori_loop(open_to, last, masked, carry)
    jax.lax.fori_loop(last, unit.last, skip, None)
    pl.when(worker == 0)(lambda: _pass_turn(scratch))
    if kernel.has_sinks:
        total = total + jnp.exp2(refs.sinks[unit.head] * tiles.LOG2E - maximum)
    total = jnp.maximum(total, tiles.LEAST)
    _store(kernel, refs, scratch, worker, unit.head, (token, begin, end), values / tiles.across(total, kernel.dim))


def _visible(kernel: _Kernel, position: Any, first_key: Any) -> Array:
    """Multiples of 8, which the compiler knows, against the rest: as keys against queries, each key has a register."""
    columns = tiles.iota((_ROWS, kernel.tuning.tile), 1)
    below = columns & 7
    newest = tiles.across(tiles.row_numbers(_ROWS) + (position - first_key), kernel.tuning.tile) - below
    visible = columns - below <= newest
    if kernel.scoring.sliding_window is not None:
        visible &= columns - below > newest - kernel.scoring.sliding_window
    return visible


def _store(
    kernel: _Kernel,
    refs: tiles.SegmentRefs,
    scratch: dict[str, Any],
    worker: Any,
    head: Any,
    tokens: tuple[Any, Any, Any],
    values: Array,
) -> None:
    """Write the rows of tokens [begin, end) of those from `token` on: what is around them belongs to other rows."""
    token, begin, end = tokens
    count = end - begin
    column = head * kernel.padded_dim
    narrow = values.astype(refs.out.dtype)

    @pl.when(count == _ROWS)
    def _() -> None:
        whole = scratch["q_tile"].at[worker]
        whole[...] = narrow
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(whole, refs.out.at[pl.ds(token, _ROWS), pl.ds(column, kernel.dim)])
        plgpu.wait_smem_to_gmem(0)

    @pl.when((count > 0) & (count < _ROWS))
    def _() -> None:
        piece = scratch["piece"].at[worker]
        for start in range(0, kernel.dim, _PIECE):
            width = min(_PIECE, kernel.dim - start)
            tiles.put(piece.at[:, pl.ds(0, width)], narrow[:, start : start + width])
            plgpu.commit_smem()
            rows = _ROWS // 2
            while rows:  # as many rows at a time as the count's binary digits say

                @pl.when((count & rows) != 0)
                def _(rows: int = rows, start: int = start) -> None:
                    first = begin + (count & ~(2 * rows - 1))
                    source = piece.at[pl.ds(first - token, rows)]
                    target = refs.out.at[pl.ds(first, rows), pl.ds(column + start, _PIECE)]
                    plgpu.copy_smem_to_gmem(source, target)

                rows //= 2
            plgpu.wait_smem_to_gmem(0)


def _fetch(kernel: _Kernel, refs: tiles.SegmentRefs, scratch: dict[str, Any], unit: _Unit, done: Any) -> None:
    """Fill the ring with the unit's key and value tiles."""
    reader, stages = kernel.reader, kernel.tuning.stages
    layer, kv_head = refs.layer[0], jax.lax.div(unit.head, jnp.int32(kernel.num_heads // kernel.num_kv_heads))
    last_page = jax.lax.div(jnp.maximum(refs.lengths[unit.row] - 1, 0), jnp.int32(reader.page_size))
    last_page = jnp.minimum(last_page, kernel.max_pages - 1)

    def step(i: Any, pages: tuple[Array, ...]) -> tuple[Array, ...]:
        following = reader.pages(refs.tables, unit.row, i + 1, last_page)  # the copies hide their latency
        taken = done + i - unit.first
        slot = jax.lax.rem(taken, jnp.int32(stages))
        for ring in ("k", "v"):

            @pl.when(taken >= stages)
            def _(ring: str = ring) -> None:
                plgpu.barrier_wait(scratch[f"{ring}_free"].at[slot])

            target, barrier = scratch[f"{ring}_ring"].at[slot], scratch[f"{ring}_ready"].at[slot]
            reader.fetch(getattr(refs, ring), pages, layer, kv_head, i, target, barrier)
        return following

    jax.lax.fori_loop(unit.first, unit.last, step, reader.pages(refs.tables, unit.row, unit.first, last_page))


def _drain(kernel: _Kernel, scratch: dict[str, Any], done: Any) -> None:
    """Wait for every arrival before the barriers go."""
    stages = kernel.tuning.stages

    def one(i: Any, _: None) -> None:
        slot = jax.lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(scratch["k_free"].at[slot])
        plgpu.barrier_wait(scratch["v_free"].at[slot])

    jax.lax.fori_loop(jnp.maximum(done - stages, 0), done, one, None)
