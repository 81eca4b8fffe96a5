"""NVFP4 matrices in checkpoints, and rounding to them.

    w[o, i] = number[o, i] * (scale[o, i / 16] / global_scale)    compressed-tensors (`nvfp4-pack-quantized`)
    w[o, i] = number[o, i] * (scale[o, i / 16] * scale_2)         NVIDIA's Model Optimizer (`quant_algo` NVFP4)

The numbers of a matrix are uint8 [O, I / 2] with two e2m1 numbers in a byte, the first in its low half: `NAME.weight_packed`, or
`NAME.weight`. `NAME.weight_scale` [O, I / 16] is in e4m3, and `NAME.weight_global_scale`, or `NAME.weight_scale_2`, one
float32. The tensors decide which matrices are quantised. Activations are not quantised, whatever the config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.quant.array import QuantArray
from jaxserve.quant.checkpoint import (
    COMPRESSED_TENSORS,
    FP8_ALGORITHMS,
    INSTEAD,
    MODELOPT,
    CheckpointForm,
    Read,
    ReadMatrix,
    are_symmetric,
    misshapen,
    only_scheme,
    unsupported,
)
from jaxserve.quant.format import Format, Host
from jaxserve.quant.formats._mxfp4_tensors import numbers_of, unpacked
from jaxserve.quant.tensor import TensorInfo

BLOCK: Final = 16
"""Inputs that share a scale."""
E4M3: Final[np.dtype] = np.dtype(ml_dtypes.float8_e4m3fn)
COMPRESSED_FORMAT: Final = "nvfp4-pack-quantized"
_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4")
_LARGEST, _LARGEST_SCALE = np.float32(6), np.float32(448)
_SCALE: Final = ".weight_scale"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names that an exporter gives to the tensors of a matrix."""

    numbers: str
    matrix_scale: str
    divides: bool
    """True if the scale of the matrix divides those of its blocks; False: it multiplies them."""
    unused: tuple[str, ...]
    """Static scales of activations; scales of the KV cache that are used were taken before."""


_COMPRESSED: Final = _Layout(
    ".weight_packed",
    ".weight_global_scale",
    divides=True,
    unused=(".input_global_scale", ".output_global_scale", ".k_scale", ".v_scale"),
)
_MODEL_OPTIMIZER: Final = _Layout(
    ".weight", ".weight_scale_2", divides=False, unused=(".input_scale", ".k_scale", ".v_scale")
)


def quantize(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return four bits per weight `[out, in]`, e4m3 scales `[out, in / size]` and the factor of all of them.

    The factor makes the largest scale 448, as the Model Optimizer does; a scale makes the largest weight of its block 6, as far as e4m3
    has it. Weights are rounded to the nearest number, ties to the even one; those beyond 6 become 6.
    """
    blocks = weights.astype(np.float32, copy=False).reshape(len(weights), -1, size)
    largest = np.abs(blocks).max(axis=2)
    factor = largest.max(initial=0) / (_LARGEST * _LARGEST_SCALE)
    factor = factor if factor > 0 else np.float32(1)
    scales = np.minimum(largest / (_LARGEST * factor), _LARGEST_SCALE).astype(E4M3)
    steps = scales.astype(np.float32) * factor
    scaled = np.clip(blocks / np.where(steps == 0, np.inf, steps)[:, :, None], -_LARGEST, _LARGEST)
    return scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(weights.shape), scales, float(factor)


def matrix_scales(num_outputs: int, *, factor: float = 1, divisor: float = 1) -> np.ndarray:
    """Return float32 `[out, 2]`: a factor and a divisor of the scales of each output's blocks."""
    return np.tile(np.array([factor, divisor], np.float32), (num_outputs, 1))


def dequantize(values: np.ndarray, scales: np.ndarray, of_matrix: np.ndarray) -> np.ndarray:
    """Return float32 `[out, in]` of bytes with two numbers, e4m3 `[out, blocks]`, and `matrix_scales`."""
    wide = numbers_of(unpacked(values))
    blocks = wide.reshape(*scales.shape, -1)  # a view: `wide` changes with it
    blocks *= (scales.astype(np.float32) * of_matrix[:, :1] / of_matrix[:, 1:])[:, :, None]
    return wide


def read_config(made: Format, found: Mapping[str, Any]) -> CheckpointForm | None:
    """Read `quantization_config`: see `CheckpointForms.read`. made: the format of the matrices."""
    match found.get("quant_method"):
        case method if method == COMPRESSED_TENSORS and found.get("format") == COMPRESSED_FORMAT:
            only_scheme(found, _check_group)
            layout = _COMPRESSED
        case method if method in (MODELOPT, "modelopt_fp4"):
            _check_algorithm(found)
            layout = _MODEL_OPTIMIZER
        case _:
            return None
    return CheckpointForm(partial(_take_matrices, made, layout), CheckpointQuantization(made.name))


def _check_algorithm(found: Mapping[str, Any]) -> None:
    if found.get("quant_algo") not in _ALGORITHMS:
        raise unsupported(".quant_algo", found.get("quant_algo"), ", ".join((*FP8_ALGORITHMS, *_ALGORITHMS, INSTEAD)))
    if found.get("group_size", BLOCK) != BLOCK:
        raise unsupported(".group_size", found["group_size"], str(BLOCK))


def _check_group(where: str, group: Mapping[str, Any]) -> None:
    weights, activations = group.get("weights", {}), group.get("input_activations")
    if not are_symmetric(weights, "float", 4):
        raise unsupported(f"{where}.weights", weights, f"symmetric 4-bit floats, {INSTEAD}")
    if weights.get("group_size", BLOCK) != BLOCK:
        raise unsupported(f"{where}.weights.group_size", weights["group_size"], str(BLOCK))
    if activations is not None and not are_symmetric(activations, "float", 4):
        raise unsupported(f"{where}.input_activations", activations, "symmetric 4-bit floats or none")


def _take_matrices(made: Format, layout: _Layout, tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    for name in [name for name in tensors if name.endswith(layout.unused)]:
        del tensors[name]
    is_taken = [name for name, info in tensors.items() if name.endswith(layout.numbers) and info.stored_dtype == "U8"]
    modules = [name.removesuffix(layout.numbers) for name in is_taken]
    return {f"{module}.weight": _take(made, layout, tensors, module) for module in modules}


def _take(made: Format, layout: _Layout, tensors: dict[str, TensorInfo], module: str) -> ReadMatrix:
    numbers = tensors.pop(module + layout.numbers)
    scales, matrix_scale = (_pop(tensors, numbers, module + suffix) for suffix in (_SCALE, layout.matrix_scale))
    if len(numbers.shape) != 2 or numbers.shape[1] % (BLOCK // 2):
        raise misshapen(numbers, f"two dimensions of U8, the last a multiple of {BLOCK // 2}")
    height, width = numbers.shape[0], 2 * numbers.shape[1]
    if scales.shape != (height, width // BLOCK) or scales.stored_dtype != "F8_E4M3":
        raise misshapen(scales, f"{(height, width // BLOCK)} of F8_E4M3")
    if matrix_scale.shape not in ((), (1,)) or matrix_scale.stored_dtype != "F32":
        raise misshapen(matrix_scale, "one number of F32")
    parts = (numbers, scales, matrix_scale)
    name, num_bytes = f"{module}.weight", sum(part.num_stored_bytes for part in parts)
    tensors[name] = replace(
        numbers,
        name=name,
        shape=(height, width),
        stored_dtype="NVFP4",
        num_stored_bytes=num_bytes,
        is_quantized=True,
    )
    return partial(_read, made, parts, divides=layout.divides)


def _read(made: Format, parts: tuple[TensorInfo, TensorInfo, TensorInfo], read: Read, *, divides: bool) -> Host:
    numbers, scales, matrix_scale = parts
    scale = float(read(matrix_scale.name).astype(np.float32).reshape(()))
    if not 0 < scale < np.inf:
        raise CheckpointError(
            f"{matrix_scale.file}: tensor {shown(matrix_scale.name)}: expected a positive number, found {scale:g}"
        )
    of_matrix = matrix_scales(numbers.shape[0], **{"divisor" if divides else "factor": scale})
    return QuantArray(made, read(numbers.name), read(scales.name), matrix_scales=of_matrix)


def _pop(tensors: dict[str, TensorInfo], numbers: TensorInfo, name: str) -> TensorInfo:
    if name in tensors:
        return tensors.pop(name)
    raise CheckpointError(f"{numbers.file}: tensor {shown(numbers.name)}: expected {shown(name)} beside it, found none")
