"""Matmuls with the weights of experts for Hopper GPUs in Pallas Mosaic GPU.

Only `whole` and `small` import Pallas, and only programs for GPUs import those.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning, grouped_tuning

Operand = jax.Array | jax.ShapeDtypeStruct
DEVICE = "h200"
"""The device whose sizes are taken. Other Hoppers have the same multiprocessors."""
_FIRST_JAX = (0, 11, 2)
WORKERS = 2
"""Warpgroups of a program that compute."""
_GROUPS = (64, 128)
"""Inputs that a scale of weights in groups may belong to."""
_PROMOTED_INPUTS = (128, 64)
"""Inputs of a step of e4m3 by e4m3, whose tensor cores add no more: the first of these that divides all."""
_RING_BYTES = 200_000
"""Bytes that the stages may use of the 227 KiB of shared memory."""
BLOCK = 32
"""Inputs that an exponent of MXFP4 belongs to."""
BLOCKS_OF_STEP = 2
"""Blocks of MXFP4 that are fetched at a time: bulk copies of fewer bytes are not swizzled."""
_NVFP4_BLOCKS, _NVFP4_INPUTS = (8, 16), 128
"""Inputs that a scale of NVFP4 may belong to, and those of a step."""
_LEAST_OUTPUTS = 64
"""Outputs of a worker, if more would not divide them all."""


def choice(x: Operand, weight: Operand) -> GroupedTuning | None:
    """Return the sizes for a matmul of rows with float weights of experts; None: the reference computes it.

    The sizes are not measured. The kernel is taken because of how often the reference reads weights, see README.
    """
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x.shape, weight.shape
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    return _fitting(grouped_tuning(DEVICE, 16, num_rows // num_experts), num_inputs, num_outputs)


def small_choice(x: Operand, weight: Operand, scales: Operand, *, dynamic: bool = False) -> GroupedTuning | None:
    """Return the sizes for 8-bit weights with a scale per output, or 4-bit and e4m3 ones with one per output and group of
    inputs, of MXFP4 an exponent, of NVFP4 that of a block; None: the reference computes it.

    dynamic: see `api.matmul`.
    """
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x.shape, weight.shape
    rows_per_expert = num_rows // num_experts
    if len(scales.shape) == 2:
        if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype not in (jnp.int8, jnp.float8_e4m3fn):
            return None
        if dynamic and weight.dtype == jnp.float8_e4m3fn:
            return _fitting(_promoted(rows_per_expert, num_inputs), num_inputs, num_outputs)
        return _fitting(grouped_tuning(DEVICE, 8, rows_per_expert), num_inputs, num_outputs)
    group = num_inputs // scales.shape[1]
    if scales.dtype == jnp.uint8:
        if x.dtype != jnp.bfloat16 or weight.dtype != jnp.int4 or group != BLOCK:
            return None
        return _fitting_blocks(grouped_tuning(DEVICE, 4, rows_per_expert), num_inputs, num_outputs)
    if weight.dtype == jnp.uint8:
        if x.dtype != jnp.bfloat16 or scales.dtype != jnp.float8_e4m3fn or group not in _NVFP4_BLOCKS:
            return None
        return _fitting_numbers(grouped_tuning(DEVICE, 4, rows_per_expert), num_inputs, num_outputs, group)
    types = ((jnp.int4, jnp.bfloat16), (jnp.float8_e4m3fn, jnp.float32))
    if x.dtype != jnp.bfloat16 or (weight.dtype, scales.dtype) not in types or group not in _GROUPS:
        return None
    sizes = replace(grouped_tuning(DEVICE, 4, rows_per_expert), inputs=group)  # two sums of a tile, as with 4 bits
    if weight.dtype == jnp.float8_e4m3fn:
        outputs = WORKERS * sizes.outputs
        stage_bytes = group * (2 * sizes.rows + outputs) + 4 * outputs
        sizes = replace(sizes, stages=min(sizes.stages, _RING_BYTES // stage_bytes))
    return _fitting(sizes, num_inputs, num_outputs)


def _promoted(rows_per_expert: int, num_inputs: int) -> GroupedTuning:
    """Return sizes for e4m3 by e4m3: two sums of a tile, as with 4 bits."""
    sizes = grouped_tuning(DEVICE, 4, rows_per_expert)
    inputs = next((each for each in _PROMOTED_INPUTS if num_inputs % each == 0), _PROMOTED_INPUTS[-1])
    stage_bytes = inputs * (sizes.rows + WORKERS * sizes.outputs)
    return replace(sizes, inputs=inputs, stages=min(sizes.stages, _RING_BYTES // stage_bytes))


def _fitting_numbers(sizes: GroupedTuning, num_inputs: int, num_outputs: int, block: int) -> GroupedTuning | None:
    """Return sizes for weights in NVFP4, whose scales take memory beside them."""
    fitting = _fitting(replace(sizes, inputs=_NVFP4_INPUTS), num_inputs, num_outputs)
    if fitting is None:
        return None
    outputs = WORKERS * fitting.outputs
    stage_bytes = _NVFP4_INPUTS * (2 * fitting.rows + outputs // 2 + outputs // block)
    return replace(fitting, stages=min(fitting.stages, _RING_BYTES // stage_bytes))


def _fitting_blocks(sizes: GroupedTuning, num_inputs: int, num_outputs: int) -> GroupedTuning | None:
    """Return sizes for weights in MXFP4; blocks of outputs may overlap, so outputs are divided by those of one worker."""
    inputs = BLOCK * BLOCKS_OF_STEP
    outputs = sizes.outputs if num_outputs % (WORKERS * sizes.outputs) == 0 else _LEAST_OUTPUTS
    is_divided = num_outputs % outputs == num_inputs % inputs == 0 and num_outputs >= WORKERS * outputs
    return replace(sizes, inputs=inputs, outputs=outputs) if is_divided and _has_kernels() else None


def _has_kernels() -> bool:
    return jax.__version_info__ >= _FIRST_JAX


def _fitting(sizes: GroupedTuning, num_inputs: int, num_outputs: int) -> GroupedTuning | None:
    """Sizes that divide the weights, if there are such."""
    if num_outputs % (WORKERS * sizes.outputs):
        sizes = replace(sizes, outputs=_LEAST_OUTPUTS)
    is_divided = num_outputs % (WORKERS * sizes.outputs) == num_inputs % sizes.inputs == 0
    return sizes if is_divided and _has_kernels() else None
