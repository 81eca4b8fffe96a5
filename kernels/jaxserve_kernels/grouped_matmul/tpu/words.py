"""Matmuls of rows with the weights of experts in words, NVFP4 and GGUF blocks, for TPUs: tiles and experts as in `small`, words upcast as in `matmul.tpu.words`.

grid = (blocks of outputs, tiles as often as they have experts)       all inputs in one step
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve_kernels.grouped_matmul.tiles import Tiles, tiles_of
from jaxserve_kernels.grouped_matmul.tpu import in_device_memory
from jaxserve_kernels.matmul.tpu import WordsTuning
from jaxserve_kernels.matmul.tpu.words import Numbers, Upcast, write_matmul

_SUBLANES = 8


@functools.partial(jax.jit, static_argnames=("tuning", "has_bfloat16"))
def grouped_matmul(
    x: Float[Array, "R I"],
    words: Int[Array, "E W O"],
    group_sizes: Int[Array, "E"],
    scales: Float[Array, "E G O"],
    matrix_scale: Float[Array, "E O"],
    *,
    tuning: WordsTuning,
    has_bfloat16: bool,
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`, for NVFP4; shapes: see `tpu.words_choice`. matrix_scale: what an output is multiplied with."""
    return multiply_groups(x, (words, scales), group_sizes, Numbers(has_bfloat16), tuning, matrix_scale)


def multiply_groups(
    x: Float[Array, "R I"],
    operands: tuple[Array, ...],
    group_sizes: Int[Array, "E"],
    upcast: Upcast,
    tuning: WordsTuning,
    matrix_scale: Float[Array, "E O"] | None = None,
) -> Float[Array, "R O"]:
    """Return x @ weights of each row's expert in float32. operands: words, and what else `upcast` reads, `[E, _, O]`."""
    (num_rows, num_inputs), (num_experts, _, num_outputs) = x.shape, operands[0].shape
    rows, outputs = tuning.rows, tuning.outputs
    tiles = tiles_of(group_sizes, num_rows, rows, alignment=rows)
    padded = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    together = min(_SUBLANES, num_experts)
    of_matrix = () if matrix_scale is None else (matrix_scale,)
    result: Array = pl.pallas_call(
        functools.partial(_kernel, upcast, len(operands), matrix_scale is not None),
        out_shape=jax.ShapeDtypeStruct((len(padded), num_outputs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_outputs, outputs), jnp.maximum(tiles.num_tiles[0], 1)),  # one without rows
            in_specs=(
                pl.BlockSpec((rows, num_inputs), lambda o, q, tiles: (tiles.starts[q] // rows, 0)),
                *(
                    pl.BlockSpec((None, each.shape[1], outputs), lambda o, q, tiles: (tiles.experts[q], 0, o))
                    for each in operands
                ),
                *(
                    pl.BlockSpec((together, outputs), lambda o, q, tiles: (tiles.experts[q] // together, o))
                    for _ in of_matrix
                ),
            ),
            out_specs=pl.BlockSpec((rows, outputs), lambda o, q, tiles: (tiles.starts[q] // rows, o)),
            scratch_shapes=[pltpu.VMEM((rows, outputs), jnp.float32), *upcast.scratch(num_inputs, outputs)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tuning.vmem_bytes
        ),
        cost_estimate=_cost(x, operands),
        name="grouped_words_matmul",
    )(tiles, padded, *map(in_device_memory, operands), *of_matrix)
    return result[:num_rows]


def _cost(x: Float[Array, "R I"], operands: tuple[Array, ...]) -> pl.CostEstimate:
    """Estimate the cost for rows that all have experts of their own, if there are so many."""
    (num_rows, num_inputs), (num_experts, _, num_outputs) = x.shape, operands[0].shape
    expert_bytes = sum(each[0].size * each.dtype.itemsize for each in operands)
    moved = min(num_rows, num_experts) * expert_bytes + num_rows * (2 * num_inputs + 4 * num_outputs)
    return pl.CostEstimate(flops=2 * num_rows * num_inputs * num_outputs, bytes_accessed=moved, transcendentals=0)


def _kernel(upcast: Upcast, num_operands: int, has_matrix_scale: bool, tiles: Tiles, x: Any, *refs: Any) -> None:
    """One tile with one expert."""
    operands, rest = refs[:num_operands], list(refs[num_operands:])
    matrix_scale = rest.pop(0) if has_matrix_scale else None
    out, sums, *scratch = rest
    tile = pl.program_id(1)
    write_matmul(upcast, x, (*operands, *scratch), sums)
    made = sums[...]
    if matrix_scale is not None:
        made *= matrix_scale[pl.ds(jax.lax.rem(tiles.experts[tile], jnp.int32(len(matrix_scale))), 1), :]
    row = tiles.starts[tile] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    out[...] = jnp.where((row >= tiles.begins[tile]) & (row < tiles.ends[tile]), made, out[...])
