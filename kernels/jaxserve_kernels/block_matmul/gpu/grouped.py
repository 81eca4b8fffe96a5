"""Matmuls of rows with the GGUF blocks of experts, for Hopper: the plan of `grouped_matmul.gpu` with the steps of `steps`.

Blocks are read as they are stored, once for each tile of an expert's rows, and upcast in registers. As in `grouped_matmul.gpu.small`, every tile
writes all of its rows, tile after tile; XLA takes each row from where it lies, and adds the parts of the inputs.

Letters: see `grouped_matmul.gpu.plan` and `steps`; R tiles of 16 outputs, B blocks, Y bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxserve_kernels.block_kinds import TILE, BlockKind
from jaxserve_kernels.block_matmul.gpu import ROWS
from jaxserve_kernels.block_matmul.gpu.steps import LINE, Steps
from jaxserve_kernels.grouped_matmul.gpu import WORKERS
from jaxserve_kernels.grouped_matmul.gpu.plan import ALIGNMENT, Plan, Unit, make_plan
from jaxserve_kernels.grouped_matmul.gpu.small import store
from jaxserve_kernels.grouped_matmul.tiles import Tiles, most_tiles, places_of, tiles_of
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    plan: Plan
    steps: Steps


class _Refs(NamedTuple):
    """Operands and the result in device memory."""

    x: Any
    weight: Any
    """Lines of bytes, `[tiles of all experts, lines, LINE]`."""
    sums: list[Any]
    """Sums of each group's activations, if the type needs them."""
    tiles: Tiles
    out: Any


@functools.partial(jax.jit, static_argnames=("kind", "tuning", "is_emulated"))
def grouped_block_matmul(
    x: Float[Array, "T I"],
    tiles: UInt8[Array, "E R B Y"],
    group_sizes: Int[Array, "E"],
    *,
    kind: BlockKind,
    tuning: GroupedTuning,
    is_emulated: bool = False,
) -> Float[Array, "T O"]:
    """See `api.grouped_block_matmul`; shapes: see `gpu.grouped_choice`."""
    (num_rows, num_inputs), (num_experts, num_tiles, *_) = x.shape, tiles.shape
    plan = make_plan(x.shape, (num_experts, TILE * num_tiles, num_inputs), tuning)
    kernel = _Kernel(plan, Steps(kind, tuning.inputs, tuning.rows, is_emulated))
    places = places_of(group_sizes, num_rows, tuning.rows, ALIGNMENT)
    return _launch(kernel, x, tiles, group_sizes)[:, places.rows].sum(0)


def _launch(
    kernel: _Kernel, x: Float[Array, "T I"], blocks: UInt8[Array, "E R B Y"], group_sizes: Int[Array, "E"]
) -> Float[Array, "X W O"]:
    """Return, by parts of the inputs, the rows of all tiles, tile after tile."""
    plan, steps, tuned, (num_experts, num_tiles, *_) = kernel.plan, kernel.steps, kernel.plan.tuning, blocks.shape
    tiles = tiles_of(group_sizes, len(x), tuned.rows, ALIGNMENT)
    padded = jnp.pad(x, ((0, tuned.rows + -len(x) % ALIGNMENT), (0, 0)))  # the last tile may end there
    by_group, *sums = steps.operands(padded)
    num_written = most_tiles(len(x), num_experts, tuned.rows, ALIGNMENT) * tuned.rows
    scratch = steps.scratch(tuned.stages, WORKERS, x.dtype) | {
        "ready": plgpu.Barrier(num_arrivals=steps.num_copies, num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=tuned.stages),
    }

    def body(*refs: Any, **scratch: Any) -> None:
        x, weight, *rest = refs
        own_sums, (*of_tiles, out) = rest[: len(sums)], rest[len(sums) :]
        _body(kernel, _Refs(x, weight, own_sums, Tiles(*of_tiles), out), scratch)

    launch = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.splits, num_written, plan.num_outputs), jnp.float32),
        grid=(tuned.programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
    )
    parts: Array = launch(by_group, blocks.reshape(num_experts * num_tiles, -1, LINE), *sums, *tiles)
    return parts


def _body(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    kernel.plan.run(
        refs.tiles,
        lambda worker, unit, done: _work(kernel, refs, scratch, worker, unit, done),
        lambda unit, done: _fetch(kernel, refs, scratch, unit, done),
        scratch["free"],
    )


def _work(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], worker: Any, unit: Unit, done: Any) -> None:
    """Compute one worker's half of a block of outputs."""
    tuned = kernel.plan.tuning

    def add_step(step: Any, total: Array) -> Array:
        slot = jax.lax.rem(done + step - unit.first, jnp.int32(tuned.stages))
        plgpu.barrier_wait(scratch["ready"].at[slot])
        total = kernel.steps.add(scratch, slot, worker, total)
        plgpu.barrier_arrive(scratch["free"].at[slot])
        return total

    zeros = plgpu.layout_cast(jnp.zeros((ROWS, tuned.rows), jnp.float32), plgpu.Layout.WGMMA)
    total = jax.lax.fori_loop(unit.first, unit.last, add_step, zeros)
    store(kernel.plan, refs.out, worker, unit, total)


def _fetch(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], unit: Unit, done: Any) -> None:
    """Fill the rings with the unit's blocks and rows."""
    plan, steps = kernel.plan, kernel.steps
    first = (unit.expert * plan.num_outputs + plan.first_output(unit.block)) // TILE
    outputs, rows = pl.ds(first, plan.block // TILE), pl.ds(unit.start, plan.tuning.rows)

    def copy(step: Any, slot: Any) -> None:
        ready, groups = scratch["ready"].at[slot], pl.ds(step * steps.groups, steps.groups)
        own = refs.weight.at[outputs, pl.ds(step * steps.lines, steps.lines)]
        plgpu.copy_gmem_to_smem(own, scratch["w_ring"].at[slot], ready)
        plgpu.copy_gmem_to_smem(refs.x.at[groups, rows], scratch["x_ring"].at[slot], ready)
        for each in refs.sums:
            plgpu.copy_gmem_to_smem(each.at[groups, rows], scratch["s_ring"].at[slot], ready)

    plan.fill(unit, done, scratch["free"], copy)
