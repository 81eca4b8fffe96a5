"""Matmuls of rows with the 8- and 4-bit weights of experts, for TPUs: weights are read as they are stored, and upcast in
VMEM. Activations of the weights' own type are multiplied as they are; on a chip without such a matmul the compiler
decides how.

4-bit weights are integers, or places of MXFP4's numbers if their scales are exponents: see `mxfp4`. They have a scale for each
output and group of inputs, as e4m3 weights in blocks have.

Rows are cut at multiples of a tile's rows, whatever their experts. A tile is computed once for each expert that has
rows in it, one after the other: all of its rows are multiplied, and the expert's own rows are written. So every copy is
aligned, nothing has to be assembled after the kernel, and experts without rows take no part in it.

    grid = (blocks of outputs, tiles as often as they have experts, steps along the inputs)

If one step has all inputs, the rows of a tile are not read again for its next expert, nor the weights of an expert for
its next tile.

XLA stores an array on a TPU with the least padding: `[E, O, I]` with outputs as lanes, if inputs do not fill whole lanes
and outputs do. Such weights are transposed: the kernel takes them as `[E, I, O]`, which is their layout in memory.

Letters: see `tiles`; I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num, UInt8

from jaxserve_kernels import mxfp4
from jaxserve_kernels.grouped_matmul.tiles import Tiles, tiles_of
from jaxserve_kernels.grouped_matmul.tpu import LANES, SmallTuning, in_device_memory
from jaxserve_kernels.matmul import quantize_rows

_ALIGNMENT = 32
"""Rows of a packed tile of 8 bits."""
_SUBLANES = 8
_PIECE = 4 * LANES
"""Inputs whose groups are added up before their sum goes to VMEM."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Compile-time parameters of one launch."""

    group: int
    """Inputs that a scale belongs to; 0: all."""
    is_mxfp4: bool
    """True if scales are exponents."""
    steps: int
    """Along the inputs."""
    is_turned: bool
    """True if outputs are the lanes of the weights."""


@functools.partial(jax.jit, static_argnames=("dynamic", "tuning"))
def grouped_matmul(
    x: Float[Array, "R I"],
    weight: Num[Array, "E O I"],
    group_sizes: Int[Array, "E"],
    scales: Float[Array, "E O"] | Float[Array, "E G O"] | UInt8[Array, "E G O"],
    *,
    dynamic: bool = False,
    tuning: SmallTuning,
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`; shapes: see `tpu.small_choice`."""
    if scales.ndim == 3 or not dynamic:
        return _launch(x, weight, group_sizes, scales, tuning)
    values, row_scales = quantize_rows(x, weight.dtype)
    return _launch(values, weight, group_sizes, scales, tuning) * row_scales[:, None]


def _launch(
    x: Num[Array, "R I"],
    weight: Num[Array, "E O I"],
    group_sizes: Int[Array, "E"],
    scales: Float[Array, "E O"] | Float[Array, "E G O"] | UInt8[Array, "E G O"],
    tuning: SmallTuning,
) -> Float[Array, "R O"]:
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x.shape, weight.shape
    rows, outputs = min(tuning.rows, pl.cdiv(num_rows, _ALIGNMENT) * _ALIGNMENT), min(tuning.outputs, num_outputs)
    group = num_inputs // scales.shape[1] if scales.ndim == 3 else 0
    plan = _Plan(group, scales.dtype == jnp.uint8, num_inputs // tuning.inputs, _is_turned(num_outputs, num_inputs))
    tiles = tiles_of(group_sizes, num_rows, rows, alignment=rows)
    padded = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    if plan.is_turned:
        weight = weight.swapaxes(1, 2)
        of_weight = pl.BlockSpec((None, tuning.inputs, outputs), lambda o, q, i, tiles: (tiles.experts[q], i, o))
    else:
        of_weight = pl.BlockSpec((None, outputs, tuning.inputs), lambda o, q, i, tiles: (tiles.experts[q], o, i))
    scratch = [pltpu.VMEM((rows, outputs), jnp.int32 if x.dtype == jnp.int8 else jnp.float32)]
    if group:
        by_group = (tuning.inputs // group, outputs)
        of_scales = pl.BlockSpec((None, *by_group), lambda o, q, i, tiles: (tiles.experts[q], i, o))
        scratch.append(pltpu.VMEM(by_group, jnp.float32))
    else:
        together = min(_SUBLANES, num_experts)
        of_scales = pl.BlockSpec((together, outputs), lambda o, q, i, tiles: (tiles.experts[q] // together, o))
    result: Array = pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=jax.ShapeDtypeStruct((len(padded), num_outputs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_outputs, outputs), jnp.maximum(tiles.num_tiles[0], 1), plan.steps),  # one without rows
            in_specs=(
                pl.BlockSpec((rows, tuning.inputs), lambda o, q, i, tiles: (tiles.starts[q] // rows, i)),
                of_weight,
                of_scales,
            ),
            out_specs=pl.BlockSpec((rows, outputs), lambda o, q, i, tiles: (tiles.starts[q] // rows, o)),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(num_rows, weight, num_outputs, bits=4 if weight.dtype == jnp.int4 else 8),
        name="grouped_matmul",
    )(tiles, padded, in_device_memory(weight) if num_experts > 1 else weight, scales)
    return result[:num_rows]


def _cost(num_rows: int, weight: Num[Array, "E ..."], num_outputs: int, *, bits: int) -> pl.CostEstimate:
    """Estimate the cost for rows that all have experts of their own, if there are so many."""
    matrix, num_taken = weight[0].size, min(num_rows, len(weight))
    moved = num_taken * matrix * bits // 8 + num_rows * (matrix // num_outputs * 2 + num_outputs * 4)
    return pl.CostEstimate(flops=2 * num_rows * matrix, bytes_accessed=moved, transcendentals=0)


def _is_turned(num_outputs: int, num_inputs: int) -> bool:
    """Return True if a matrix takes less memory with outputs as lanes. XLA would copy it first if it were stored otherwise."""

    def size(rows: int, lanes: int) -> int:
        return pl.cdiv(rows, _SUBLANES) * _SUBLANES * pl.cdiv(lanes, LANES) * LANES

    return size(num_inputs, num_outputs) < size(num_outputs, num_inputs)


def _kernel(
    plan: _Plan, tiles: Tiles, x: Any, weight: Any, scales: Any, out: Any, sums: Any, wide_scales: Any = None
) -> None:
    """One step of a tile with one expert."""
    tile, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    if plan.group:
        # packed rows cannot be taken from anywhere
        wide_scales[...] = mxfp4.scales_of(scales[...]) if plan.is_mxfp4 else scales[...].astype(jnp.float32)
        _add_groups(plan, x, weight, wide_scales, sums)
    else:
        sums[...] += _multiply(plan, x[...], weight[...], sums.dtype)

    @pl.when(step == plan.steps - 1)
    def _() -> None:
        made = sums[...].astype(jnp.float32)
        if not plan.group:
            made = made * scales[pl.ds(jax.lax.rem(tiles.experts[tile], jnp.int32(len(scales))), 1), :]
        row = tiles.starts[tile] + jax.lax.broadcasted_iota(jnp.int32, made.shape, 0)
        out[...] = jnp.where((row >= tiles.begins[tile]) & (row < tiles.ends[tile]), made, out[...])


def _add_groups(plan: _Plan, x: Any, weight: Any, scales: Any, sums: Any) -> None:
    """The matmul of each group, scaled. Of groups that share their lanes all lanes are multiplied, with the inputs of
    the others taken for 0."""
    num_inputs, group = x.shape[1], plan.group

    def add(start: Any, size: int) -> None:
        total = jnp.zeros(sums.shape, jnp.float32)
        for first in range(0, size, LANES):
            count = min(LANES, size - first)
            inputs = pl.ds(start + first, count)
            rows, own = x[:, inputs], weight[inputs, :] if plan.is_turned else weight[:, inputs]
            own = own.astype(rows.dtype)
            if plan.is_mxfp4:
                own = mxfp4.numbers_at(own)
            lane = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
            for begin in range(0, count, group):
                is_own = (lane >= begin) & (lane < begin + group)
                part = rows if group == count else jnp.where(is_own, rows, jnp.zeros_like(rows))
                scale = scales[pl.ds((start + first + begin) // group, 1), :]
                total += _multiply(plan, part, own, jnp.float32) * scale
        sums[...] += total

    def add_piece(piece: Any, _: None) -> None:
        add(pl.multiple_of(piece * _PIECE, _PIECE), _PIECE)

    jax.lax.fori_loop(0, num_inputs // _PIECE, add_piece, None)
    if num_inputs % _PIECE:
        add(num_inputs // _PIECE * _PIECE, num_inputs % _PIECE)


def _multiply(plan: _Plan, x: Num[Array, "R I"], weight: Num[Array, "..."], dtype: Any) -> Num[Array, "R O"]:
    dimensions = (((1,), (0 if plan.is_turned else 1,)), ((), ()))
    result: Array = jax.lax.dot_general(x, weight.astype(x.dtype), dimensions, preferred_element_type=dtype)
    return result
