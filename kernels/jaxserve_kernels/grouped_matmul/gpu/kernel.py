"""Products of rows with the weights of experts, for Hopper: every weight that is needed comes once for each tile of rows.

A tile is so many rows of one expert, 64 where experts have few and 128 where they have many. A unit of work is a tile
times a block of outputs times a part of the inputs; a persistent grid takes them one after the other, the blocks of a
tile side by side. A program has two workers (compute warpgroups, each with outputs of its own) and one warpgroup that
fetches for both.

An expert's rows begin anywhere, but shared memory is laid out in blocks of 8 rows: its first tile begins at the
multiple of 8 before them. What a tile computes for rows that are not its own stays unwritten. How inputs are parted
depends on shapes alone, so a row's result depends on itself; XLA adds the parts.

Letters: R rows, E experts, I inputs, O outputs, Q tiles, X parts of the inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.grouped_matmul.gpu import WORKERS
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning

ALIGNMENT = 8
"""Of a tile's first row: shared memory is laid out in tiles of 8 rows."""
_FETCHER = WORKERS
_WORK_REGISTERS, _FETCH_REGISTERS = 232, 40
"""Per thread: 2 x 128 x 232 + 128 x 40 are just below the 65,536 of a multiprocessor."""
_FEW = 16
"""Rows: where a tile has no more, no more are fetched."""
_PIECE = 32
"""Columns of a ragged result on their way out: whole 128-byte lines."""


class Tiles(NamedTuple):
    """Of them `num_tiles` are real."""

    num_tiles: Int[Array, "1"]
    experts: Int[Array, "Q"]
    starts: Int[Array, "Q"]
    """Of a tile: a multiple of 8."""
    begins: Int[Array, "Q"]
    """The first row in it that is its expert's."""
    ends: Int[Array, "Q"]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Static facts of one launch."""

    num_inputs: int
    num_outputs: int
    steps: int
    """Along the inputs, of a unit at most."""
    tuning: GroupedTuning

    @property
    def block(self) -> int:
        """Outputs of a unit."""
        return WORKERS * self.tuning.outputs

    @property
    def num_blocks(self) -> int:
        return self.num_outputs // self.block

    @property
    def splits(self) -> int:
        """Parts of the inputs."""
        return pl.cdiv(self.num_inputs // self.tuning.inputs, self.steps)

    def rounds(self, program: Any, refs: _Refs) -> Any:
        """Units that a program does."""
        programs = self.tuning.programs
        units = refs.tiles.num_tiles[0] * (self.num_blocks * self.splits)
        return jax.lax.div(units - program + (programs - 1), jnp.int32(programs))

    def unit(self, program: Any, turn: Any, refs: _Refs) -> _Unit:
        index = turn * self.tuning.programs + program
        tile, part = jax.lax.div(index, jnp.int32(self.num_blocks * self.splits)), jnp.int32(self.splits)
        block = jax.lax.rem(jax.lax.div(index, part), jnp.int32(self.num_blocks))
        split = jax.lax.rem(index, part)
        tiles, first = refs.tiles, split * self.steps
        last = jnp.minimum(first + self.steps, self.num_inputs // self.tuning.inputs)
        start = pl.multiple_of(tiles.starts[tile], ALIGNMENT)
        return _Unit(tiles.experts[tile], start, tiles.begins[tile], tiles.ends[tile], block, split, first, last)


class _Unit(NamedTuple):
    """Rows of one tile, a block of outputs, and the steps [first, last) along the inputs."""

    expert: Any
    start: Any
    begin: Any
    end: Any
    block: Any
    split: Any
    first: Any
    last: Any


class _Refs(NamedTuple):
    """Operands and the result in device memory."""

    x: Any
    weight: Any
    tiles: Tiles
    out: Any


@functools.partial(jax.jit, static_argnames=("tuning",))
def grouped_matmul(
    x: Float[Array, "R I"],
    weight: Float[Array, "E O I"],
    group_sizes: Int[Array, "E"],
    *,
    tuning: GroupedTuning,
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`; shapes: see `gpu.choice`."""
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[1]
    steps = _steps(x.shape, weight.shape, tuning)
    kernel = _Kernel(num_inputs, num_outputs, steps, tuning)
    tiles = tiles_of(group_sizes, num_rows, tuning.rows)
    padded = jnp.pad(x, ((0, tuning.rows + -num_rows % ALIGNMENT), (0, 0)))  # the last tile may end there
    launch = plgpu.kernel(
        lambda x, weight, *refs, **scratch: _body(kernel, _Refs(x, weight, Tiles(*refs[:-1]), refs[-1]), scratch),
        out_type=jax.ShapeDtypeStruct((kernel.splits, num_rows, num_outputs), jnp.float32),
        grid=(tuning.programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(kernel, x.dtype),
    )
    parts: Array = launch(padded, weight.reshape(-1, num_inputs), *tiles)
    return parts.sum(0)


def _steps(x: tuple[int, ...], weight: tuple[int, ...], tuning: GroupedTuning) -> int:
    """Of a unit: so few that every multiprocessor has work, if each row has an expert of its own."""
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x, weight
    units = min(num_rows, num_experts) * (num_outputs // (WORKERS * tuning.outputs))
    return pl.cdiv(num_inputs // tuning.inputs, max(1, tuning.programs // units))


def tiles_of(group_sizes: Int[Array, "E"], num_rows: int, rows: int) -> Tiles:
    """Cut each expert's rows into tiles, without a loop: one would keep the step out of a CUDA graph."""
    num_experts = len(group_sizes)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    firsts = starts // ALIGNMENT * ALIGNMENT
    counts = jnp.where(group_sizes > 0, -(-(ends - firsts) // rows), 0)
    totals = jnp.cumsum(counts)
    # An expert with n rows has at most (n + 7) / rows tiles, rounded up.
    most = (num_rows + min(num_rows, num_experts) * (rows + ALIGNMENT - 2)) // rows
    index = jnp.arange(most, dtype=jnp.int32)
    experts = jnp.minimum((totals <= index[:, None]).sum(1), num_experts - 1)
    tile_starts = firsts[experts] + (index - (totals - counts)[experts]) * rows
    begins = jnp.maximum(tile_starts, starts[experts])
    tile_ends = jnp.minimum(tile_starts + rows, ends[experts])
    return Tiles(*(each.astype(jnp.int32) for each in (totals[-1:], experts, tile_starts, begins, tile_ends)))


def _scratch(kernel: _Kernel, dtype: Any) -> dict[str, Any]:
    tuned = kernel.tuning
    return {
        "x_ring": _tiled((tuned.stages, tuned.rows, tuned.inputs), dtype),
        "w_ring": _tiled((tuned.stages, kernel.block, tuned.inputs), dtype),
        "piece": plgpu.SMEM((WORKERS, tuned.rows, _PIECE), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=tuned.stages),
    }


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles that tensor cores and bulk copies take."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    transforms = (plgpu.TilingTransform((ALIGNMENT, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _body(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")
    rounds = kernel.rounds(program, refs)

    @pl.when(warpgroup < WORKERS)
    def _() -> None:
        plgpu.set_max_registers(_WORK_REGISTERS, action="increase")

        def one(turn: Any, done: Any) -> Any:
            unit = kernel.unit(program, turn, refs)
            _work(kernel, refs, scratch, warpgroup, unit, done)
            return done + (unit.last - unit.first)

        jax.lax.fori_loop(0, rounds, one, jnp.int32(0))

    @pl.when(warpgroup == _FETCHER)
    def _() -> None:
        plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

        def one(turn: Any, done: Any) -> Any:
            unit = kernel.unit(program, turn, refs)
            _fetch(kernel, refs, scratch, unit, done)
            return done + (unit.last - unit.first)

        done = jax.lax.fori_loop(0, rounds, one, jnp.int32(0))
        _drain(kernel, scratch, done)


def _work(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], worker: Any, unit: _Unit, done: Any) -> None:
    """One worker's half of a block; `done` counts the steps of the units before."""
    tuned = kernel.tuning
    outputs = pl.ds(worker * tuned.outputs, tuned.outputs)

    def slot_of(step: Any) -> Any:
        return jax.lax.rem(done + step - unit.first, jnp.int32(tuned.stages))

    def multiply(accumulator: Any) -> Array:
        def one(step: Any, _: None) -> None:
            slot = slot_of(step)
            plgpu.barrier_wait(scratch["ready"].at[slot])
            w_tile = scratch["w_ring"].at[slot, outputs]
            plgpu.wgmma(accumulator, scratch["x_ring"].at[slot], w_tile.transpose((1, 0)))
            plgpu.wgmma_wait(1)  # for the one before

            @pl.when(step > unit.first)
            def free() -> None:
                plgpu.barrier_arrive(scratch["free"].at[slot_of(step - 1)])

        jax.lax.fori_loop(unit.first, unit.last, one, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch["free"].at[slot_of(unit.last - 1)])
        return accumulator[...]

    product = pl.run_scoped(multiply, plgpu.ACC((tuned.rows, tuned.outputs), jnp.float32))
    _store(kernel, refs, scratch["piece"].at[worker], unit, unit.block * kernel.block + worker * tuned.outputs, product)


def _store(kernel: _Kernel, refs: _Refs, piece: Any, unit: _Unit, column: Any, product: Array) -> None:
    """Write the rows that are the tile's own: what is around them belongs to other experts."""
    rows, outputs = product.shape
    count = unit.end - unit.begin
    out = refs.out.at[unit.split]

    @pl.when(count == rows)
    def _() -> None:
        out.at[pl.ds(unit.start, rows), pl.ds(column, outputs)][...] = product

    @pl.when(count < rows)
    def _() -> None:
        for start in range(0, outputs, _PIECE):
            piece[...] = product[:, start : start + _PIECE]
            plgpu.commit_smem()
            some = rows // 2
            while some:  # as many rows at a time as the count's binary digits say

                @pl.when((count & some) != 0)
                def _(some: int = some, start: int = start) -> None:
                    first = unit.begin + (count & ~(2 * some - 1))
                    source = piece.at[pl.ds(first - unit.start, some)]
                    plgpu.copy_smem_to_gmem(source, out.at[pl.ds(first, some), pl.ds(column + start, _PIECE)])

                some //= 2
            plgpu.wait_smem_to_gmem(0)


def _fetch(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], unit: _Unit, done: Any) -> None:
    """Fill the ring with the unit's rows and weights."""
    tuned = kernel.tuning
    outputs = pl.ds(unit.expert * kernel.num_outputs + unit.block * kernel.block, kernel.block)

    def one(step: Any, _: None) -> None:
        taken = done + step - unit.first
        slot = jax.lax.rem(taken, jnp.int32(tuned.stages))

        @pl.when(taken >= tuned.stages)
        def wait() -> None:
            plgpu.barrier_wait(scratch["free"].at[slot])

        ready, inputs = scratch["ready"].at[slot], pl.ds(step * tuned.inputs, tuned.inputs)
        plgpu.copy_gmem_to_smem(refs.weight.at[outputs, inputs], scratch["w_ring"].at[slot], ready)
        is_small = unit.end - unit.start <= _FEW
        for rows, is_wanted in ((_FEW, is_small), (tuned.rows, ~is_small)):

            @pl.when(is_wanted)
            def _(rows: int = rows) -> None:
                target = scratch["x_ring"].at[slot, pl.ds(0, rows)]
                plgpu.copy_gmem_to_smem(refs.x.at[pl.ds(unit.start, rows), inputs], target, ready)

    jax.lax.fori_loop(unit.first, unit.last, one, None)


def _drain(kernel: _Kernel, scratch: dict[str, Any], done: Any) -> None:
    """Wait for every arrival before the barriers go."""
    stages = kernel.tuning.stages

    def one(i: Any, _: None) -> None:
        plgpu.barrier_wait(scratch["free"].at[jax.lax.rem(i, jnp.int32(stages))])

    jax.lax.fori_loop(jnp.maximum(done - stages, 0), done, one, None)
