"""Matmuls of rows with the 16-bit weights of experts, for Hopper: every weight that is needed comes once for each tile
of rows.

A tile has 64 rows where experts have few and 128 where they have many. What it computes for rows that are not its own
stays unwritten; XLA adds the parts of the inputs. Letters: see `plan`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.grouped_matmul.gpu import WORKERS
from jaxserve_kernels.grouped_matmul.gpu.plan import ALIGNMENT, Plan, Unit, make_plan
from jaxserve_kernels.grouped_matmul.tiles import Tiles, tiles_of
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning
from jaxserve_kernels.hopper import tiled

_PIECE = 32
"""Columns of a ragged result on their way out: whole 128-byte lines."""


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
    plan = make_plan(x.shape, weight.shape, tuning)
    tiles = tiles_of(group_sizes, num_rows, tuning.rows, ALIGNMENT)
    padded = jnp.pad(x, ((0, tuning.rows + -num_rows % ALIGNMENT), (0, 0)))  # the last tile may end there
    launch = plgpu.kernel(
        lambda x, weight, *refs, **scratch: _body(plan, _Refs(x, weight, Tiles(*refs[:-1]), refs[-1]), scratch),
        out_type=jax.ShapeDtypeStruct((plan.splits, num_rows, num_outputs), jnp.float32),
        grid=(tuning.programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(plan, x.dtype),
    )
    parts: Array = launch(padded, weight.reshape(-1, num_inputs), *tiles)
    return parts.sum(0)


def _scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    tuned = plan.tuning
    return {
        "x_ring": tiled((tuned.stages, tuned.rows, tuned.inputs), dtype),
        "w_ring": tiled((tuned.stages, plan.block, tuned.inputs), dtype),
        "piece": plgpu.SMEM((WORKERS, tuned.rows, _PIECE), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=tuned.stages),
    }


def _body(plan: Plan, refs: _Refs, scratch: dict[str, Any]) -> None:
    plan.run(
        refs.tiles,
        lambda worker, unit, done: _work(plan, refs, scratch, worker, unit, done),
        lambda unit, done: _fetch(plan, refs, scratch, unit, done),
        scratch["free"],
    )


def _work(plan: Plan, refs: _Refs, scratch: dict[str, Any], worker: Any, unit: Unit, done: Any) -> None:
    """One worker's half of a block."""
    tuned = plan.tuning
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

    result = pl.run_scoped(multiply, plgpu.ACC((tuned.rows, tuned.outputs), jnp.float32))
    _store(refs, scratch["piece"].at[worker], unit, unit.block * plan.block + worker * tuned.outputs, result)


def _store(refs: _Refs, piece: Any, unit: Unit, column: Any, result: Array) -> None:
    """Write the rows that are the tile's own: what is around them belongs to other experts."""
    rows, outputs = result.shape
    count = unit.end - unit.begin
    out = refs.out.at[unit.split]

    @pl.when(count == rows)
    def _() -> None:
        out.at[pl.ds(unit.start, rows), pl.ds(column, outputs)][...] = result

    @pl.when(count < rows)
    def _() -> None:
        for start in range(0, outputs, _PIECE):
            piece[...] = result[:, start : start + _PIECE]
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


def _fetch(plan: Plan, refs: _Refs, scratch: dict[str, Any], unit: Unit, done: Any) -> None:
    """Fill the ring with the unit's rows and weights."""
    tuned = plan.tuning
    outputs = pl.ds(unit.expert * plan.num_outputs + unit.block * plan.block, plan.block)

    def copy(step: Any, slot: Any) -> None:
        ready, inputs = scratch["ready"].at[slot], pl.ds(step * tuned.inputs, tuned.inputs)
        plgpu.copy_gmem_to_smem(refs.weight.at[outputs, inputs], scratch["w_ring"].at[slot], ready)
        plan.copy_rows(unit, refs.x.at[:, inputs], scratch["x_ring"].at[slot], ready)

    plan.fill(unit, done, scratch["free"], copy)
