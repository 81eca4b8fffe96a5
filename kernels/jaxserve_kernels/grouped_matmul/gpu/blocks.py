"""The steps of `small` for weights in MXFP4: two blocks of inputs, whose weights are scaled in registers.

A scale is a power of two, so a scaled weight is exact in bfloat16, and all steps are added by the tensor cores. The rows of
each block are a tile of their own in shared memory. Letters: see `plan`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxserve_kernels import mxfp4
from jaxserve_kernels.grouped_matmul.gpu import BLOCK, BLOCKS_OF_STEP, WORKERS
from jaxserve_kernels.grouped_matmul.gpu.plan import Plan, Unit
from jaxserve_kernels.hopper import stored, tiled, widened

_MANTISSA_BITS = 23


def scratch(plan: Plan, dtype: Any, *, is_emulated: bool) -> dict[str, Any]:
    """Return the rings of rows and exponents, and the barriers of their copies."""
    tuned = plan.tuning
    rings = {
        "x_ring": tiled((tuned.stages, BLOCKS_OF_STEP, tuned.rows, BLOCK), dtype),
        "s_ring": plgpu.SMEM((tuned.stages, BLOCKS_OF_STEP, plan.block), jnp.uint8),
        "ready": plgpu.Barrier(num_arrivals=2 + BLOCKS_OF_STEP, num_barriers=tuned.stages),
    }
    return rings | ({"wide": tiled((WORKERS, tuned.outputs, BLOCK), dtype)} if is_emulated else {})


def fetch(plan: Plan, unit: Unit, step: Any, operands: tuple[Any, Any], target: tuple[dict[str, Any], Any]) -> None:
    """Start the copies of a step's rows and exponents. operands: those. target: the scratch, and the slot of its rings."""
    (x, exponents), (rings, slot) = operands, target
    ready, first = rings["ready"].at[slot], step * BLOCKS_OF_STEP
    rows = pl.ds(unit.expert * (plan.num_inputs // BLOCK) + first, BLOCKS_OF_STEP)
    columns = pl.ds(plan.first_output(unit.block), plan.block)
    plgpu.copy_gmem_to_smem(exponents.at[rows, columns], rings["s_ring"].at[slot], ready)
    for block in range(BLOCKS_OF_STEP):
        inputs = pl.ds((first + block) * BLOCK, BLOCK)
        plan.copy_rows(unit, x.at[:, inputs], rings["x_ring"].at[slot, block], ready)


def multiply(rings: dict[str, Any], slot: Any, outputs: Any, accumulator: Any, emulated: Any) -> None:
    """Add the matmul of a step to the accumulator. emulated: the worker, where the interpreter runs it; else None."""
    dtype = jnp.bfloat16
    numbers = mxfp4.numbers_at(widened(rings["w_ring"].at[slot, outputs], dtype))
    for block in range(BLOCKS_OF_STEP):
        by_output = plgpu.Layout.WGMMA.reduce(1)
        exponents = plgpu.load(rings["s_ring"].at[slot, block, outputs], layout=by_output).astype(jnp.int32)
        scales = jax.lax.bitcast_convert_type(exponents << _MANTISSA_BITS, jnp.float32).astype(dtype)
        own = numbers[:, block * BLOCK : (block + 1) * BLOCK]
        wide = own * jax.lax.broadcast_in_dim(scales, own.shape, (0,))
        tile = wide if emulated is None else stored(wide, rings["wide"].at[emulated])
        plgpu.wgmma(accumulator, tile, rings["x_ring"].at[slot, block].transpose((1, 0)))
        plgpu.wgmma_wait(0)
