"""Matmuls of few tokens with 8- and 4-bit weights for Hopper GPUs in Pallas Mosaic GPU.

Only `skinny` and `stream` import Pallas, and only programs for GPUs import that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve_kernels.devices import multiprocessors
from jaxserve_kernels.matmul.tuning import TOKENS, SkinnyTuning, matmul_types, skinny_tuning

Operand = jax.Array | jax.ShapeDtypeStruct
_DEVICE = "h200"
"""The device whose measurements are taken. Programs are as many as this device has multiprocessors."""
FIRST_JAX = (0, 11, 2)
_GROUPED_ROWS = 64
"""Outputs of each worker, for weights in groups."""
_GROUPS = (64, 128)
"""Inputs that a scale of weights in groups may belong to: a tile's."""
_GROUPED_TYPES = ((jnp.int4, jnp.bfloat16), (jnp.float8_e4m3fn, jnp.float32))
"""Types of weights and scales in groups."""
_BLOCK_TYPES = (jnp.uint8, jnp.float8_e4m3fn)
"""Types of weights and scales in NVFP4: two numbers a byte."""
_BLOCKS = (8, 16)
"""Inputs that a scale of weights in NVFP4 may belong to."""
_TILE_OF_BLOCKS = 128
"""Inputs of a step for weights in NVFP4."""
_MOST_GROUPED_TOKENS = 128
"""More would need two sums of more registers than there are."""
_STEP_OF_E4M3 = 128
"""Most inputs of e4m3 by e4m3 that the tensor cores add in one sum."""
_MOST_SUMS_OF_E4M3 = 64 * _MOST_GROUPED_TOKENS
"""Most results of a worker for e4m3 by e4m3, which have two sums each, too."""
MOST_TOKENS_OF_FOUR = 64
"""Tokens for which four workers have enough registers."""
_MOST_STAGES = 8
RING_BYTES = 200_000
"""Bytes that the kernel may use of the 227 KiB of shared memory."""
NUM_PROGRAMS = 132
"""Multiprocessors of H100 and H200 (SXM), for a process that only compiles for them."""


def choice(x: Operand, weight: Operand, *, dynamic: bool = False) -> SkinnyTuning | None:
    """Sizes with which the kernel was measured to be faster than XLA at such a matmul; None: XLA computes it.

    dynamic: see `api.matmul`.
    """
    if is_split():
        return None
    types = matmul_types(weight.dtype.name, dynamic=dynamic)
    tuned = skinny_tuning(_DEVICE, types, x.shape[0], weight.size * weight.dtype.itemsize)
    if tuned is None or not supports(x, weight, tuned):
        return None
    return replace(tuned, programs=multiprocessors(tuned.programs))


def grouped_choice(x: Operand, weight: Operand, scales: Operand) -> SkinnyTuning | None:
    """Return the sizes for a matmul with weights of 4 bits, or in e4m3, in groups, or in NVFP4; None: XLA computes it.

    The sizes are not measured. The kernel is taken because of what XLA writes to memory beside such weights, see README.
    """
    if is_split():
        return None
    (num_tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    group, padded = num_inputs // scales.shape[0], -(-num_tokens // 8) * 8
    has_four = padded <= MOST_TOKENS_OF_FOUR and num_outputs % (4 * _GROUPED_ROWS) == 0
    workers = 4 if has_four else 2
    tile = _tile(group, num_inputs, (weight.dtype, scales.dtype))
    is_supported = (
        jax.__version_info__ >= FIRST_JAX
        and x.dtype == jnp.bfloat16
        and padded <= _MOST_GROUPED_TOKENS
        and num_outputs % (workers * _GROUPED_ROWS) == 0
    )
    if tile is None or not is_supported:
        return None
    sizes = SkinnyTuning(_GROUPED_ROWS, tile, _MOST_STAGES, multiprocessors(NUM_PROGRAMS), workers)
    return replace(sizes, stages=most_stages(sizes, padded, weight, scales))


def _tile(group: int, num_inputs: int, types: tuple[Any, Any]) -> int | None:
    """Return the inputs of a step for weights and scales of such types in groups of so many inputs."""
    if types in _GROUPED_TYPES:
        return group if group in _GROUPS else None
    is_in_blocks = types == _BLOCK_TYPES and group in _BLOCKS
    return _TILE_OF_BLOCKS if is_in_blocks and num_inputs % _TILE_OF_BLOCKS == 0 else None


def most_stages(sizes: SkinnyTuning, num_tokens: int, weight: Operand, scales: Operand) -> int:
    """Return the number of tiles of activations, weights and scales in groups that are kept in shared memory."""
    is_packed = weight.dtype == jnp.uint8
    num_inputs = weight.shape[1] * (2 if is_packed else 1)
    bits = 4 if is_packed or weight.dtype == jnp.int4 else 8
    scale_bytes = scales.shape[0] * sizes.tile // num_inputs * sizes.block * scales.dtype.itemsize
    tile_bytes = sizes.tile * (2 * num_tokens + sizes.block * bits // 8) + scale_bytes
    return min(_MOST_STAGES, RING_BYTES // tile_bytes)


def is_split() -> bool:
    """Return True if XLA must split this matmul over devices, which it cannot do with a kernel.

    Within `jax.shard_map` each device has a matmul of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual


def supports(x: Operand, weight: Operand, tuning: SkinnyTuning) -> bool:
    """Return True if the kernel computes this matmul with these sizes."""
    num_outputs, num_inputs = weight.shape
    return (
        jax.__version_info__ >= FIRST_JAX
        and x.dtype in (jnp.bfloat16, jnp.float16, weight.dtype)
        and weight.dtype in (jnp.int8, jnp.float8_e4m3fn)
        and x.shape[0] <= TOKENS[-1]
        and (x.dtype != jnp.float8_e4m3fn or adds_e4m3(x.shape[0], tuning))
        and num_outputs % tuning.block == 0
        and num_inputs % tuning.tile == 0
    )


def adds_e4m3(num_tokens: int, tuning: SkinnyTuning) -> bool:
    """Return True if these sizes serve e4m3 by e4m3: the tensor cores add few inputs at a time, and both sums have registers."""
    return tuning.tile <= _STEP_OF_E4M3 and tuning.rows * num_tokens <= _MOST_SUMS_OF_E4M3
