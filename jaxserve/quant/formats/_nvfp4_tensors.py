"""NVFP4 matrices in checkpoints, and rounding to them.

    w[o, i] = number[o, i] * (scale[o, i / 16] / global_scale)    compressed-tensors (`nvfp4-pack-quantized`)
    w[o, i] = number[o, i] * (scale[o, i / 16] * scale_2)         NVIDIA's Model Optimizer (`quant_algo` NVFP4)

The numbers of a matrix are uint8 [O, I / 2] with two e2m1 numbers in a byte, the first in its low half: `NAME.weight_packed`, or
`NAME.weight`. `NAME.weight_scale` [O, I / 16] is in e4m3, and `NAME.weight_global_scale`, or `NAME.weight_scale_2`, one
float32. The tensors decide which matrices are quantised. Activations are not quantised, whatever the config says. Other matrices may be in
fp8: these are dequantised. The Model Optimizer's matrices of experts may be stored together, with another first axis [E] (Step 3.7 Flash).
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
    has_weights,
    misshapen,
    only_scheme,
    unsupported,
)
from jaxserve.quant.format import Format, Host
from jaxserve.quant.formats import fp8
from jaxserve.quant.formats._mxfp4_tensors import numbers_of, unpacked
from jaxserve.quant.tensor import TensorInfo

BLOCK: Final = 16
"""Inputs that share a scale."""
E4M3: Final[np.dtype] = np.dtype(ml_dtypes.float8_e4m3fn)
COMPRESSED_FORMAT: Final = "nvfp4-pack-quantized"
_MIXED_FORMAT, _MIXED_ALGORITHM = "mixed-precision", "MIXED_PRECISION"
"""Formats of checkpoints whose groups or layers have formats of their own."""
_ALGORITHMS: Final = ("NVFP4", "W4A16_NVFP4")
_FP8_ALGORITHMS: Final = (*FP8_ALGORITHMS, "FP8_PB_WO")
"""Algorithms of layers beside layers in NVFP4: one scale, one for each output, or one for each block."""
_LARGEST, _LARGEST_SCALE = np.float32(6), np.float32(448)
_WEIGHT, _PACKED_DTYPE = ".weight", "U8"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Ends that an exporter adds to the name of a matrix."""

    numbers: str
    matrix_scale: str
    divides: bool
    """True if the scale of the matrix divides those of its blocks; False: it multiplies them."""


_COMPRESSED: Final = _Layout("_packed", "_global_scale", divides=True)
_MODEL_OPTIMIZER: Final = _Layout("", "_scale_2", divides=False)
_UNUSED: Final = (".input_global_scale", ".output_global_scale")
"""Static scales of activations, besides those of `fp8`."""


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
        case method if method == COMPRESSED_TENSORS and found.get("format") in (COMPRESSED_FORMAT, _MIXED_FORMAT):
            if not has_weights(found, "float", 4):
                return None
            only_scheme(found, _check_group)
            layout = _COMPRESSED
        case method if method in (MODELOPT, "modelopt_fp4"):
            _check_algorithms(found)
            layout = _MODEL_OPTIMIZER
        case _:
            return None
    return CheckpointForm(partial(_take_matrices, made, layout), CheckpointQuantization(made.name))


def _check_algorithms(found: Mapping[str, Any]) -> None:
    if found.get("quant_algo") != _MIXED_ALGORITHM:
        _check_algorithm("", found, _ALGORITHMS)
        return
    layers = found.get("quantized_layers") or {}
    for name, layer in layers.items() if isinstance(layers, dict) else ():
        if isinstance(layer, dict) and layer.get("quant_algo") is not None:
            _check_algorithm(f".quantized_layers.{shown(name)}", layer, (*_ALGORITHMS, *_FP8_ALGORITHMS))


def _check_algorithm(where: str, found: Mapping[str, Any], supported: tuple[str, ...]) -> None:
    if found.get("quant_algo") not in supported:
        others = supported if where else (*FP8_ALGORITHMS, *supported, _MIXED_ALGORITHM)
        raise unsupported(f"{where}.quant_algo", found.get("quant_algo"), ", ".join((*others, INSTEAD)))
    if found["quant_algo"] in _ALGORITHMS and found.get("group_size", BLOCK) != BLOCK:
        raise unsupported(f"{where}.group_size", found["group_size"], str(BLOCK))


def _check_group(where: str, group: Mapping[str, Any]) -> None:
    weights, activations = group.get("weights", {}), group.get("input_activations")
    if are_symmetric(weights, "float", 8):
        fp8.check_group(where, group)
        return
    if not are_symmetric(weights, "float", 4):
        raise unsupported(f"{where}.weights", weights, f"symmetric floats of 4 or 8 bits, {INSTEAD}")
    if weights.get("group_size", BLOCK) != BLOCK:
        raise unsupported(f"{where}.weights.group_size", weights["group_size"], str(BLOCK))
    if activations is not None and not are_symmetric(activations, "float", 4):
        raise unsupported(f"{where}.input_activations", activations, "symmetric 4-bit floats or none")


def _take_matrices(made: Format, layout: _Layout, tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    for name in [name for name in tensors if name.endswith(_UNUSED)]:
        del tensors[name]
    packed = [info for info in tensors.values() if info.stored_dtype == _PACKED_DTYPE and _has_numbers(info, layout)]
    taken = dict(_take(made, layout, tensors, numbers) for numbers in packed)
    return taken | fp8.take_floats(tensors)


def _has_numbers(info: TensorInfo, layout: _Layout) -> bool:
    """Return True for the numbers of a matrix by their name; those of all experts have that of a parameter."""
    return info.name.endswith(_WEIGHT + layout.numbers) or (len(info.shape) == 3 and info.name.endswith(layout.numbers))


def _take(made: Format, layout: _Layout, tensors: dict[str, TensorInfo], numbers: TensorInfo) -> tuple[str, ReadMatrix]:
    """Return the name of a matrix, and how to read it."""
    del tensors[numbers.name]
    name = numbers.name.removesuffix(layout.numbers)
    scales, matrix_scale = (_pop(tensors, numbers, name + end) for end in ("_scale", layout.matrix_scale))
    if len(numbers.shape) not in (2, 3) or numbers.shape[-1] % (BLOCK // 2):
        raise misshapen(numbers, f"two dimensions of {_PACKED_DTYPE}, the last a multiple of {BLOCK // 2}")
    *outputs, width = *numbers.shape[:-1], 2 * numbers.shape[-1]
    experts = tuple(outputs[:-1])
    if scales.shape != (*outputs, width // BLOCK) or scales.stored_dtype != "F8_E4M3":
        raise misshapen(scales, f"{(*outputs, width // BLOCK)} of F8_E4M3")
    if matrix_scale.shape not in ((), (1,), experts) or matrix_scale.stored_dtype != "F32":
        raise misshapen(matrix_scale, "one number of F32")
    parts = (numbers, scales, matrix_scale)
    tensors[name] = replace(
        numbers,
        name=name,
        shape=(*outputs, width),
        stored_dtype="NVFP4",
        num_stored_bytes=sum(part.num_stored_bytes for part in parts),
        is_quantized=True,
    )
    return name, partial(_read, made, parts, divides=layout.divides)


def _read(made: Format, parts: tuple[TensorInfo, TensorInfo, TensorInfo], read: Read, *, divides: bool) -> Host:
    numbers, scales, matrix_scale = parts
    outputs = numbers.shape[:-1]
    stored = read(matrix_scale.name).astype(np.float32)
    if not np.all((stored > 0) & (stored < np.inf)):
        raise CheckpointError(
            f"{matrix_scale.file}: tensor {shown(matrix_scale.name)}: expected a positive number, found {stored.min():g}"
        )
    of_matrix = np.ones((*outputs[:-1], 1, 2), np.float32)
    of_matrix[..., 0, 1 if divides else 0] = stored.reshape(stored.shape if stored.size > 1 else ())
    wide = np.broadcast_to(of_matrix, (*outputs, 2))
    return QuantArray(made, read(numbers.name), read(scales.name), matrix_scales=wide)


def _pop(tensors: dict[str, TensorInfo], numbers: TensorInfo, name: str) -> TensorInfo:
    if name in tensors:
        return tensors.pop(name)
    raise CheckpointError(f"{numbers.file}: tensor {shown(numbers.name)}: expected {shown(name)} beside it, found none")
