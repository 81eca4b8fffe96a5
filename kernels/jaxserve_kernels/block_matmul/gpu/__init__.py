"""Matmuls of few tokens with GGUF blocks for Hopper GPUs in Pallas Mosaic GPU.

Only `skinny` and `upcast` import Pallas, and only programs for GPUs import that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve_kernels.block_kinds import GROUP, TILE, BlockKind
from jaxserve_kernels.devices import multiprocessors
from jaxserve_kernels.matmul.gpu import FIRST_JAX, MOST_TOKENS_OF_FOUR, NUM_PROGRAMS, RING_BYTES, is_split
from jaxserve_kernels.matmul.tuning import SkinnyTuning

Operand = jax.Array | jax.ShapeDtypeStruct
_STEP_OF_BLOCKS, _STEP_OF_LARGE_BLOCKS = 128, 256
"""Inputs of a step: four blocks, or one with scales of two levels."""
_ROWS = 64
"""Outputs of a worker."""
_MOST_STAGES = 8
_LEAST_STAGES = 2
_MOST_TOKENS = 128
"""More would need two sums of more registers than there are."""


def choice(x: Operand, tiles: Operand, kind: BlockKind) -> SkinnyTuning | None:
    """Return the sizes for a matmul with blocks; None: XLA computes it.

    The sizes are not measured. The kernel is taken because of what XLA writes to memory beside such weights, see README.
    """
    num_outputs, padded = TILE * tiles.shape[0], -(-x.shape[0] // 8) * 8
    step = _STEP_OF_BLOCKS if kind.num_inputs == GROUP else _STEP_OF_LARGE_BLOCKS
    workers = 4 if padded <= MOST_TOKENS_OF_FOUR and num_outputs % (4 * _ROWS) == 0 else 2
    is_supported = (
        jax.__version_info__ >= FIRST_JAX
        and not is_split()
        and x.dtype == jnp.bfloat16
        and padded <= _MOST_TOKENS
        and num_outputs % (workers * _ROWS) == 0
        and x.shape[1] % step == 0
    )
    if not is_supported:
        return None
    weight_bytes = workers * _ROWS // TILE * (step // kind.num_inputs) * kind.tile_bytes
    stages = min(_MOST_STAGES, RING_BYTES // (weight_bytes + padded * (2 * step + 4 * step // GROUP)))
    return SkinnyTuning(_ROWS, step, max(_LEAST_STAGES, stages), multiprocessors(NUM_PROGRAMS), workers)
