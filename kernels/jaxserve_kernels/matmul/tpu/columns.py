"""Columns of a matrix of words for TPUs: looked up rows of an embedding table.

XLA gathers whole rows of lanes only, and copies all of the matrix into an order in which a column is one, at each call.

    grid = (blocks of 128 results, results of a block)
       HBM -> VMEM   the 128 columns among which a result's is       the next ones while these are rotated
       rotated until the column is at the result's lane, which is written
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from jaxserve_kernels.tpu_words import LANES


@jax.jit
def columns(words: Int[Array, "W O"], indices: Int[Array, "T"]) -> Int[Array, "W T"]:
    """Return words[:, indices], of the nearest column if there is none. There are whole lanes of words."""
    num_words, num_results = len(words), len(indices)
    of_block = min(num_results, LANES)
    known = jnp.clip(indices.astype(jnp.int32), 0, words.shape[1] - 1)
    padded = jnp.pad(known, (0, -num_results % of_block))
    num_blocks = len(padded) // of_block
    found: Array = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((num_words, num_blocks * LANES), words.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks, of_block),
            in_specs=[
                pl.BlockSpec((num_words, LANES), lambda block, i, at: (0, jax.lax.div(at[block * of_block + i], LANES)))
            ],
            out_specs=pl.BlockSpec((num_words, LANES), lambda block, i, at: (0, block)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=4 * num_words * LANES * len(padded), transcendentals=0),
        name="columns",
    )(padded, words)
    return found[:, :num_results]


def _kernel(indices: Any, words: Any, out: Any) -> None:
    """Write one column."""
    lane = pl.program_id(1)
    index = indices[pl.program_id(0) * pl.num_programs(1) + lane]
    moved = pltpu.roll(words[...], jax.lax.rem(lane - jax.lax.rem(index, LANES) + LANES, LANES), 1)
    is_own = jax.lax.broadcasted_iota(jnp.int32, out.shape, 1) == lane
    out[...] = jnp.where(is_own, moved, out[...])
