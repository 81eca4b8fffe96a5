"""Matmuls with GGUF blocks for Hopper GPUs in Pallas Mosaic GPU: of few tokens, and of any number of rows with experts.

Only `skinny`, `grouped`, `steps` and `upcast` import Pallas, and only programs for GPUs import that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve_kernels.block_kinds import GROUP, TILE, BlockKind
from jaxserve_kernels.devices import multiprocessors
from jaxserve_kernels.grouped_matmul.gpu import DEVICE, WORKERS
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning, grouped_tuning
from jaxserve_kernels.matmul.gpu import FIRST_JAX, MOST_TOKENS_OF_FOUR, NUM_PROGRAMS, RING_BYTES, is_split
from jaxserve_kernels.matmul.tuning import SkinnyTuning

Operand = jax.Array | jax.ShapeDtypeStruct
_STEP_OF_BLOCKS, _STEP_OF_LARGE_BLOCKS = 128, 256
"""Inputs of a step: four blocks, or one with scales of two levels."""
ROWS = 64
"""Outputs of a worker."""
_MOST_STAGES = 8
_LEAST_STAGES = 2
_MOST_ROWS = 64
"""Rows of a tile of an expert. With 128, sums and the weights that are upcast need more registers than there are."""
_MOST_TOKENS = 128
"""More would need two sums of more registers than there are."""


def choice(x: Operand, tiles: Operand, kind: BlockKind) -> SkinnyTuning | None:
    """Return the sizes for a matmul with blocks; None: XLA computes it.

    The sizes are not measured. The kernel is taken because of what XLA writes to memory beside such weights, see README.
    """
    num_outputs, padded = TILE * tiles.shape[0], -(-x.shape[0] // 8) * 8
    step, workers = _step(kind), 4 if padded <= MOST_TOKENS_OF_FOUR and num_outputs % (4 * ROWS) == 0 else 2
    is_supported = (
        jax.__version_info__ >= FIRST_JAX
        and not is_split()
        and x.dtype == jnp.bfloat16
        and padded <= _MOST_TOKENS
        and num_outputs % (workers * ROWS) == 0
        and x.shape[1] % step == 0
    )
    if not is_supported:
        return None
    return SkinnyTuning(ROWS, step, _stages(kind, workers, padded), multiprocessors(NUM_PROGRAMS), workers)


def grouped_choice(x: Operand, tiles: Operand, kind: BlockKind) -> GroupedTuning | None:
    """Return the sizes for a matmul of rows with the blocks of experts; None: XLA computes it. They are not measured."""
    num_experts, num_outputs, step = tiles.shape[0], TILE * tiles.shape[1], _step(kind)
    rows = min(grouped_tuning(DEVICE, 4, x.shape[0] // num_experts).rows, _MOST_ROWS)
    is_supported = (
        jax.__version_info__ >= FIRST_JAX
        and x.dtype == jnp.bfloat16
        and num_outputs % ROWS == 0
        and num_outputs >= WORKERS * ROWS
        and x.shape[1] % step == 0
    )
    if not is_supported:
        return None
    return GroupedTuning(rows, ROWS, step, _stages(kind, WORKERS, rows), multiprocessors(NUM_PROGRAMS))


def _step(kind: BlockKind) -> int:
    """Return the inputs of a step."""
    return _STEP_OF_BLOCKS if kind.num_inputs == GROUP else _STEP_OF_LARGE_BLOCKS


def _stages(kind: BlockKind, workers: int, columns: int) -> int:
    """Return the steps in flight."""
    step = _step(kind)
    weight_bytes = workers * ROWS // TILE * (step // kind.num_inputs) * kind.tile_bytes
    stages = min(_MOST_STAGES, RING_BYTES // (weight_bytes + columns * (2 * step + 4 * step // GROUP)))
    return max(_LEAST_STAGES, stages)
