"""MXFP4 matrices in memory and in checkpoints: see `jaxserve_kernels.mxfp4` for the numbers.

`NAME_blocks` uint8 [E, O, I / 32, 16] and `NAME_scales` uint8 [E, O, I / 32] are the matrices of a layer's experts in
safetensors of gpt-oss. A block of a GGUF file is 17 bytes: the exponent, then 16 bytes, each with the number j in its low
half and the number j + 16 in its high half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.checkpoint import Read, ReadMatrix
from jaxserve.quant.format import Host
from jaxserve.quant.stored_blocks import StoredBlocks
from jaxserve.quant.tensor import TensorInfo

BLOCK: Final = 32
"""Inputs that share a scale."""
BIAS: Final = 127
"""Added to the exponents of scales."""
_LARGEST_EXPONENT: Final = 2
"""Exponent of the largest e2m1 number, 6."""
_LARGEST: Final = np.float32(6)
_BLOCKS, _SCALES = "_blocks", "_scales"
_NUMBERS: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The e2m1 number of each four bits."""
_PLACES: Final = np.array([*range(8), *range(0, -8, -1)], np.int8).astype(ml_dtypes.int4)
"""The place of each four bits among the sizes, with the sign."""


def has_native_kernel() -> bool:
    """Return True if the native CPU kernels multiply with e2m1 weights on this host."""
    from jaxserve_kernels.native import float4

    return float4.is_built()


def unpacked(values: np.ndarray) -> np.ndarray:
    """Return the four bits of each number as uint8 `[..., in]`, from bytes of two numbers or from signed places."""
    if values.dtype == ml_dtypes.int4:
        places = values.astype(np.int8)
        return np.where(places < 0, 8 - places, places).astype(np.uint8)
    codes: np.ndarray = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
    return codes


def packed(codes: np.ndarray) -> np.ndarray:
    """Return bytes of two numbers, the first in the low half."""
    values: np.ndarray = codes[..., 0::2] | codes[..., 1::2] << 4
    return values


def as_places(codes: np.ndarray) -> np.ndarray:
    """Return four bits as the int4 signed place among the sizes; -0 becomes 0."""
    places: np.ndarray = _PLACES[codes]
    return places


def scales_of(exponents: np.ndarray) -> np.ndarray:
    """Return float32 scales of e8m0 exponents; 255 is NaN."""
    scales: np.ndarray = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return scales


def numbers_of(codes: np.ndarray) -> np.ndarray:
    """Return the float32 numbers of four bits each."""
    numbers: np.ndarray = _NUMBERS[codes]
    return numbers


def quantize(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return four bits per weight `[out, in]` and exponents `[out, in / size]`, as section 6.3 of the specification defines.

    A scale is the largest power of two that is not above the block's largest weight, over 4. Weights are rounded to the
    nearest number, ties to the even one; those beyond 6 become 6.
    """
    blocks = weights.astype(np.float32, copy=False).reshape(len(weights), -1, size)
    exponents = np.frexp(np.abs(blocks).max(axis=2))[1] - 1 - _LARGEST_EXPONENT
    stored = np.clip(exponents + BIAS, 0, 254).astype(np.uint8)
    scaled = np.clip(blocks / scales_of(stored)[:, :, None], -_LARGEST, _LARGEST)
    return scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(weights.shape), stored


def from_gguf(stored: StoredBlocks) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of two numbers `[out, in / 2]` and exponents `[out, in / 32]` of a matrix in a GGUF file's blocks."""
    blocks = stored.blocks.reshape(len(stored.blocks), -1, stored.block_bytes)
    halves = blocks[:, :, 1:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(blocks), -1)
    return packed(codes), np.ascontiguousarray(blocks[:, :, 0])


def take_matrices(
    make: Callable[[np.ndarray, np.ndarray], Host], tensors: dict[str, TensorInfo]
) -> dict[str, ReadMatrix]:
    """Take the blocks and scales of each matrix: see `CheckpointForm.take_matrices`. make: of bytes and exponents."""
    matrices: dict[str, ReadMatrix] = {}
    for blocks in [info for name, info in tensors.items() if name.endswith(_BLOCKS)]:
        del tensors[blocks.name]
        name = blocks.name.removesuffix(_BLOCKS)
        scales = tensors.pop(name + _SCALES, None)
        shape = _shape(blocks, scales)
        assert scales is not None, "their shape was checked"
        tensors[name] = replace(
            blocks,
            name=name,
            shape=shape,
            stored_dtype="MXFP4",
            num_stored_bytes=blocks.num_stored_bytes + scales.num_stored_bytes,
            is_quantized=True,
        )
        matrices[name] = partial(_read, make, name)
    return matrices


def _read(make: Callable[[np.ndarray, np.ndarray], Host], name: str, read: Read) -> Host:
    blocks = read(name + _BLOCKS)
    return make(blocks.reshape(*blocks.shape[:2], -1), read(name + _SCALES))


def _shape(blocks: TensorInfo, scales: TensorInfo | None) -> tuple[int, ...]:
    """Return `[experts, out, in]`."""
    if len(blocks.shape) == 4 and blocks.shape[3] == BLOCK // 2 and scales is not None:
        experts, outputs, groups, _ = blocks.shape
        if scales.shape == (experts, outputs, groups):
            return (experts, outputs, groups * BLOCK)
    raise CheckpointError(
        f"{blocks.file}: tensor {shown(blocks.name)}: expected blocks of {BLOCK // 2} bytes for each of its scales, "
        f"found shapes {blocks.shape} and {None if scales is None else scales.shape}"
    )
