"""Matmuls of rows with the 8- and 4-bit weights of experts, for Hopper: weights are read as they are stored, once for
each tile of rows, and widened in registers. Activations of the weights' own type are multiplied with them as they are.

The result is computed transposed, as in `matmul.gpu.skinny`: outputs fill the 64 rows that a matmul of the tensor cores
has, and rows are its columns, so a tile can have as few as 16. Every tile writes all of its rows, tile after tile; XLA
takes each row from where it lies, adds the parts of the inputs, and applies the scales.

4-bit weights, and e4m3 ones in blocks, have a scale for each output and group of inputs; a group is a step, whose matmul is
scaled before it is added. Tensor cores keep about 14 bits of a sum of e4m3 by e4m3: where activations are e4m3, too, they add no
more than a step, and steps are added in float32. Weights in MXFP4 and NVFP4 are multiplied with the scales of their blocks themselves, which is exact (see `blocks` and `upcast`).

Letters: see `plan`; G groups of inputs, P bytes of two numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt8

from jaxserve_kernels import upcast, words
from jaxserve_kernels.grouped_matmul.gpu import WORKERS, blocks
from jaxserve_kernels.grouped_matmul.gpu.plan import ALIGNMENT, Plan, Unit, make_plan
from jaxserve_kernels.grouped_matmul.tiles import Tiles, most_tiles, places_of, tiles_of
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning
from jaxserve_kernels.hopper import stored, tiled, widened
from jaxserve_kernels.matmul import quantize_rows

Scaling = Literal["outputs", "groups", "mxfp4", "nvfp4"]
"""Owner of a scale: an output; an output and a step; a block of MXFP4 or NVFP4 within a step."""


class _Refs(NamedTuple):
    """Operands and the result in device memory."""

    x: Any
    weight: Any
    scales: Any
    """Scales of groups or blocks, or None."""
    tiles: Tiles
    out: Any


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One launch."""

    plan: Plan
    is_emulated: bool
    """True if the interpreter runs it."""
    scaling: Scaling
    is_upcast: bool
    """True if weights are upcast in words, and the inputs of each step of x permuted for that."""
    blocks_of_step: int = 0
    """Blocks of NVFP4."""
    is_promoted: bool = False
    """True if the matmul of each step is added to those before it in float32."""

    @property
    def step_columns(self) -> int:
        """Columns of stored weights in a step's inputs: a byte has two numbers of NVFP4."""
        return self.plan.tuning.inputs // (2 if self.scaling == "nvfp4" else 1)


@functools.partial(jax.jit, static_argnames=("dynamic", "tuning", "is_emulated"))
def grouped_matmul(
    x: Float[Array, "R I"],
    weight: Num[Array, "E O I"] | UInt8[Array, "E O P"],
    group_sizes: Int[Array, "E"],
    scales: Float[Array, "E O"] | Float[Array, "E G O"] | UInt8[Array, "E G O"],
    *,
    dynamic: bool = False,
    tuning: GroupedTuning,
    is_emulated: bool = False,
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`; shapes: see `gpu.small_choice`. Of NVFP4, numbers times the scales of their blocks."""
    scaling, num_inputs = _scaling(weight, scales), x.shape[1]
    is_upcast = not (is_emulated or scaling == "mxfp4" or dynamic) and upcast.is_supported(x.dtype, weight.dtype)
    plan = make_plan(x.shape, (*weight.shape[:2], num_inputs), tuning)
    blocks_of_step = scales.shape[1] * tuning.inputs // num_inputs if scaling == "nvfp4" else 0
    is_promoted = dynamic and weight.dtype == jnp.float8_e4m3fn and scaling == "outputs"
    kernel = _Kernel(plan, is_emulated, scaling, is_upcast, blocks_of_step, is_promoted)
    places = places_of(group_sizes, len(x), tuning.rows, ALIGNMENT)
    if scales.ndim == 3:
        return _launch(kernel, x, weight, group_sizes, scales)[:, places.rows].sum(0)
    values, row_scales = quantize_rows(x, weight.dtype) if dynamic else (x, None)
    made = _launch(kernel, values, weight, group_sizes, None)[:, places.rows].sum(0).astype(jnp.float32)
    result = made if row_scales is None else made * row_scales[:, None]
    return result * scales[places.experts]


def _scaling(weight: Array, scales: Array) -> Scaling:
    if scales.ndim == 2:
        return "outputs"
    if weight.dtype == jnp.uint8:
        return "nvfp4"
    return "mxfp4" if scales.dtype == jnp.uint8 else "groups"


def _launch(
    kernel: _Kernel,
    x: Num[Array, "R I"],
    weight: Num[Array, "E O _"],
    group_sizes: Int[Array, "E"],
    scales: Float[Array, "E G O"] | UInt8[Array, "E G O"] | None,
) -> Num[Array, "X W O"]:
    """By parts of the inputs, the rows of all tiles, tile after tile: W = Q * rows."""
    plan, tuned, num_experts, num_rows = kernel.plan, kernel.plan.tuning, len(weight), len(x)
    tiles = tiles_of(group_sizes, num_rows, tuned.rows, ALIGNMENT)
    padded = jnp.pad(x, ((0, tuned.rows + -num_rows % ALIGNMENT), (0, 0)))  # the last tile may end there
    if kernel.is_upcast:
        padded = upcast.permuted(padded, weight.dtype, tuned.inputs)
    by_group = () if scales is None else (scales.reshape(-1, plan.num_outputs),)
    num_written = most_tiles(num_rows, num_experts, tuned.rows, ALIGNMENT) * tuned.rows
    dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32

    def body(*refs: Any, **scratch: Any) -> None:
        x, weight, *rest = refs
        own_scales = rest.pop(0) if by_group else None
        _body(kernel, _Refs(x, weight, own_scales, Tiles(*rest[:-1]), rest[-1]), scratch)

    launch = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.splits, num_written, plan.num_outputs), dtype),
        grid=(tuned.programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(kernel, x.dtype, weight.dtype, None if scales is None else scales.dtype),
    )
    parts: Array = launch(padded, weight.reshape(-1, weight.shape[2]), *by_group, *tiles)
    return parts


def _scratch(kernel: _Kernel, dtype: Any, weight_dtype: Any, scale_dtype: Any) -> dict[str, Any]:
    plan, tuned = kernel.plan, kernel.plan.tuning
    scratch = {
        "x_ring": tiled((tuned.stages, tuned.rows, tuned.inputs), dtype),
        "w_ring": tiled((tuned.stages, plan.block, kernel.step_columns), weight_dtype),
        "ready": plgpu.Barrier(num_arrivals=2 if scale_dtype is None else 3, num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=tuned.stages),
    }
    if kernel.scaling == "mxfp4":
        scratch |= blocks.scratch(plan, dtype, is_emulated=kernel.is_emulated)
        return scratch
    if kernel.scaling == "nvfp4":
        shape = tuned.stages, kernel.blocks_of_step, plan.block
        scratch["s_ring"] = tiled(shape, scale_dtype, columns=tuned.outputs)
    elif scale_dtype is not None:
        scratch["s_ring"] = plgpu.SMEM((tuned.stages, plan.block), scale_dtype)
    if kernel.is_emulated and dtype != weight_dtype:
        scratch["wide"] = tiled((WORKERS, tuned.outputs, tuned.inputs), dtype)
    return scratch


def _body(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any]) -> None:
    kernel.plan.run(
        refs.tiles,
        lambda worker, unit, done: _work(kernel, refs, scratch, worker, unit, done),
        lambda unit, done: _fetch(kernel, refs, scratch, unit, done),
        scratch["free"],
    )


def _work(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], worker: Any, unit: Unit, done: Any) -> None:
    """One worker's half of a block."""
    tuned = kernel.plan.tuning
    outputs, shape = pl.ds(worker * tuned.outputs, tuned.outputs), (tuned.outputs, tuned.rows)
    factor = words.factor(scratch["w_ring"].dtype, jnp.bfloat16) if kernel.is_upcast else 1

    def slot_of(step: Any) -> Any:
        return jax.lax.rem(done + step - unit.first, jnp.int32(tuned.stages))

    def multiply_step(step: Any, accumulator: Any) -> None:
        x_tile, w_tile = scratch["x_ring"].at[slot_of(step)], scratch["w_ring"].at[slot_of(step), outputs]
        if kernel.scaling == "nvfp4":
            s_tile = scratch["s_ring"].at[slot_of(step), :, outputs]
            if kernel.is_upcast:
                w_tile = upcast.upcast_blocks(w_tile, s_tile)
            else:
                wide = upcast.dequantized_blocks(w_tile, s_tile, x_tile.dtype)
                w_tile = stored(wide, scratch["wide"].at[worker])
        elif kernel.is_upcast:
            w_tile = upcast.upcast(w_tile)
        elif w_tile.dtype != x_tile.dtype:
            wide = widened(w_tile, x_tile.dtype)
            w_tile = wide if not kernel.is_emulated else stored(wide, scratch["wide"].at[worker])
        plgpu.wgmma(accumulator, w_tile, x_tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)

    def add_step(step: Any, accumulator: Any) -> None:
        plgpu.barrier_wait(scratch["ready"].at[slot_of(step)])
        multiply_step(step, accumulator)
        plgpu.barrier_arrive(scratch["free"].at[slot_of(step)])

    def matmul_of_step(step: Any) -> Array:
        def multiply(accumulator: Any) -> Array:
            multiply_step(step, accumulator)
            return accumulator[...]

        result: Array = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
        return result

    def add_promoted(step: Any, total: Array) -> Array:
        """Return the sum of the steps before and this one, in float32."""
        plgpu.barrier_wait(scratch["ready"].at[slot_of(step)])
        result = matmul_of_step(step)
        plgpu.barrier_arrive(scratch["free"].at[slot_of(step)])
        return total + result

    def add_group(step: Any, total: Array) -> Array:
        """The matmul of one group, scaled, on top of the others."""
        plgpu.barrier_wait(scratch["ready"].at[slot_of(step)])
        by_output = plgpu.Layout.WGMMA.reduce(1)
        scales = plgpu.load(scratch["s_ring"].at[slot_of(step), outputs], layout=by_output).astype(jnp.float32)
        scales = scales * factor
        result = matmul_of_step(step)
        plgpu.barrier_arrive(scratch["free"].at[slot_of(step)])
        return total + result * jax.lax.broadcast_in_dim(scales, shape, (0,))

    def add_blocks(step: Any, accumulator: Any) -> None:
        plgpu.barrier_wait(scratch["ready"].at[slot_of(step)])
        blocks.multiply(scratch, slot_of(step), outputs, accumulator, None if not kernel.is_emulated else worker)
        plgpu.barrier_arrive(scratch["free"].at[slot_of(step)])

    def multiply(accumulator: Any) -> Array:
        add = add_blocks if kernel.scaling == "mxfp4" else add_step
        jax.lax.fori_loop(unit.first, unit.last, lambda step, _: add(step, accumulator), None)
        return accumulator[...]

    if kernel.scaling == "groups" or kernel.is_promoted:
        add = add_promoted if kernel.is_promoted else add_group
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        total = jax.lax.fori_loop(unit.first, unit.last, add, zeros)
    else:
        total = pl.run_scoped(multiply, plgpu.ACC(shape, refs.out.dtype)) * factor
    store(kernel.plan, refs.out, worker, unit, total)


def store(plan: Plan, out: Any, worker: Any, unit: Unit, total: Array) -> None:
    """Write a worker's outputs, but for those that the block before has as well."""
    tuned, first = plan.tuning, plan.first_output(unit.block) + worker * plan.tuning.outputs

    def write() -> None:
        rows, columns = pl.ds(unit.tile * tuned.rows, tuned.rows), pl.ds(first, tuned.outputs)
        target = out.at[unit.split, rows, columns].transpose((1, 0))
        target[...] = plgpu.layout_cast(total, plgpu.Layout.WGMMA_TRANSPOSED)

    if plan.is_divided:
        write()
    else:
        pl.when(first >= unit.block * plan.block)(write)


def _fetch(kernel: _Kernel, refs: _Refs, scratch: dict[str, Any], unit: Unit, done: Any) -> None:
    """Fill the ring with the unit's rows, weights, and scales of groups."""
    plan = kernel.plan
    tuned, columns = plan.tuning, pl.ds(plan.first_output(unit.block), plan.block)
    outputs = pl.ds(unit.expert * plan.num_outputs + plan.first_output(unit.block), plan.block)
    own_steps = unit.expert * (plan.num_inputs // tuned.inputs)

    def copy(step: Any, slot: Any) -> None:
        ready, inputs = scratch["ready"].at[slot], pl.ds(step * tuned.inputs, tuned.inputs)
        own = refs.weight.at[outputs, pl.ds(step * kernel.step_columns, kernel.step_columns)]
        plgpu.copy_gmem_to_smem(own, scratch["w_ring"].at[slot], ready)
        if kernel.scaling == "mxfp4":
            blocks.fetch(plan, unit, step, (refs.x, refs.scales), (scratch, slot))
            return
        if refs.scales is not None:
            count = kernel.blocks_of_step
            groups = pl.ds((own_steps + step) * count, count) if count else own_steps + step
            plgpu.copy_gmem_to_smem(refs.scales.at[groups, columns], scratch["s_ring"].at[slot], ready)
        plan.copy_rows(unit, refs.x.at[:, inputs], scratch["x_ring"].at[slot], ready)

    plan.fill(unit, done, scratch["free"], copy)
