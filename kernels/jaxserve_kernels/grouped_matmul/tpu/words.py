"""Matmuls of rows with the weights of experts in NVFP4 for TPUs: tiles and experts as in `small`, words upcast as in `matmul.tpu.words`.

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
from jaxserve_kernels.matmul.tpu.words import Numbers, write_product

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
    """See `api.grouped_matmul`; shapes: see `tpu.words_choice`. matrix_scale: what an output is multiplied with."""
    (num_rows, num_inputs), (num_experts, num_words, num_outputs) = x.shape, words.shape
    rows, outputs, upcast = tuning.rows, tuning.outputs, Numbers(has_bfloat16)
    tiles = tiles_of(group_sizes, num_rows, rows, alignment=rows)
    padded = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    together = min(_SUBLANES, num_experts)
    product: Array = pl.pallas_call(
        functools.partial(_kernel, upcast),
        out_shape=jax.ShapeDtypeStruct((len(padded), num_outputs), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_outputs, outputs), jnp.maximum(tiles.num_tiles[0], 1)),  # one without rows
            in_specs=(
                pl.BlockSpec((rows, num_inputs), lambda o, q, tiles: (tiles.starts[q] // rows, 0)),
                pl.BlockSpec((None, num_words, outputs), lambda o, q, tiles: (tiles.experts[q], 0, o)),
                pl.BlockSpec((None, scales.shape[1], outputs), lambda o, q, tiles: (tiles.experts[q], 0, o)),
                pl.BlockSpec((together, outputs), lambda o, q, tiles: (tiles.experts[q] // together, o)),
            ),
            out_specs=pl.BlockSpec((rows, outputs), lambda o, q, tiles: (tiles.starts[q] // rows, o)),
            scratch_shapes=[pltpu.VMEM((rows, outputs), jnp.float32), *upcast.scratch(num_inputs, outputs)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tuning.vmem_bytes
        ),
        cost_estimate=_cost(num_rows, words, scales),
        name="grouped_words_matmul",
    )(tiles, padded, in_device_memory(words), in_device_memory(scales), matrix_scale)
    return product[:num_rows]


def _cost(num_rows: int, words: Int[Array, "E W O"], scales: Float[Array, "E G O"]) -> pl.CostEstimate:
    """Estimate the cost for rows that all have experts of their own, if there are so many."""
    weights, num_taken = 8 * words[0].size, min(num_rows, len(words))
    moved = num_taken * (4 * words[0].size + scales[0].size) + num_rows * (16 * words.shape[1] + 4 * words.shape[2])
    return pl.CostEstimate(flops=2 * num_rows * weights, bytes_accessed=moved, transcendentals=0)


def _kernel(
    upcast: Numbers,
    tiles: Tiles,
    x: Any,
    words: Any,
    scales: Any,
    matrix_scale: Any,
    out: Any,
    sums: Any,
    halves: Any,
) -> None:
    """One tile with one expert."""
    tile = pl.program_id(1)
    write_product(upcast, x, (words, scales, halves), sums)
    own = matrix_scale[pl.ds(jax.lax.rem(tiles.experts[tile], jnp.int32(len(matrix_scale))), 1), :]
    row = tiles.starts[tile] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    is_own = (row >= tiles.begins[tile]) & (row < tiles.ends[tile])
    out[...] = jnp.where(is_own, sums[...] * own, out[...])
