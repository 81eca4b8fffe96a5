"""NVFP4 weights of compressed-tensors (`nvfp4-pack-quantized`): dequantised as they are loaded.

    w[o, i] = number[o, i] * (scale[o, i / 16] / global_scale)

`NAME.weight_packed` uint8 [O, I / 2] has two e2m1 numbers in a byte, the first in its low half; `NAME.weight_scale` [O, I / 16] is
in e4m3, and `NAME.weight_global_scale` one float32. The tensors decide which matrices are quantised. Activations are not quantised,
whatever `input_activations` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.checkpoint import (
    COMPRESSED_TENSORS,
    INSTEAD,
    CheckpointForm,
    CheckpointForms,
    Read,
    ReadMatrix,
    only_scheme,
    unsupported,
)
from jaxserve.quant.formats._mxfp4_tensors import numbers_of, unpacked
from jaxserve.quant.tensor import TensorInfo

_FORMAT: Final = "nvfp4-pack-quantized"
_BLOCK: Final = 16
_PACKED, _SCALE, _GLOBAL_SCALE = ".weight_packed", ".weight_scale", ".weight_global_scale"
_UNUSED: Final = (".input_global_scale", ".output_global_scale", ".k_scale", ".v_scale")
"""Static scales of activations and KV cache."""
_NOTE: Final = (
    "NVFP4 weights are dequantised as they are loaded; --quantization int4-weight-only keeps 4 bits, rounded again"
)


def _take_matrices(tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    for name in [name for name in tensors if name.endswith(_UNUSED)]:
        del tensors[name]
    modules = [name.removesuffix(_PACKED) for name in tensors if name.endswith(_PACKED)]
    return {f"{module}.weight": _take(tensors, module) for module in modules}


def _take(tensors: dict[str, TensorInfo], module: str) -> ReadMatrix:
    numbers = tensors.pop(module + _PACKED)
    scales, global_scale = (_pop(tensors, numbers, module + suffix) for suffix in (_SCALE, _GLOBAL_SCALE))
    if len(numbers.shape) != 2 or numbers.stored_dtype != "U8" or numbers.shape[1] % (_BLOCK // 2):
        raise _misshapen(numbers, f"two dimensions of U8, the last a multiple of {_BLOCK // 2}")
    height, width = numbers.shape[0], 2 * numbers.shape[1]
    if scales.shape != (height, width // _BLOCK) or scales.stored_dtype != "F8_E4M3":
        raise _misshapen(scales, f"{(height, width // _BLOCK)} of F8_E4M3")
    if global_scale.shape not in ((), (1,)) or global_scale.stored_dtype != "F32":
        raise _misshapen(global_scale, "one number of F32")
    parts = (numbers, scales, global_scale)
    name, num_bytes = f"{module}.weight", sum(part.num_stored_bytes for part in parts)
    tensors[name] = replace(numbers, name=name, shape=(height, width), stored_dtype="NVFP4", num_stored_bytes=num_bytes)
    return partial(_read, parts)


def _read(parts: tuple[TensorInfo, TensorInfo, TensorInfo], read: Read) -> np.ndarray:
    """Return the dequantised matrix in float32: no format has such scales."""
    numbers, scales, global_scale = parts
    divisor = read(global_scale.name).astype(np.float32).reshape(())
    if not 0 < divisor < np.inf:
        raise CheckpointError(
            f"{global_scale.file}: tensor {shown(global_scale.name)}: expected a positive number, found {divisor}"
        )
    wide = numbers_of(unpacked(read(numbers.name)))
    blocks = wide.reshape(*scales.shape, _BLOCK)  # a view: `wide` changes with it
    blocks *= (read(scales.name).astype(np.float32) / divisor)[:, :, None]
    return wide


def _pop(tensors: dict[str, TensorInfo], numbers: TensorInfo, name: str) -> TensorInfo:
    if name in tensors:
        return tensors.pop(name)
    raise CheckpointError(f"{numbers.file}: tensor {shown(numbers.name)}: expected {shown(name)} beside it, found none")


def _misshapen(info: TensorInfo, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {shown(info.name)}: expected {expected}, found shape {info.shape} of {info.stored_dtype}"
    )


def _read_config(found: Mapping[str, Any]) -> CheckpointForm | None:
    if found.get("quant_method") != COMPRESSED_TENSORS or found.get("format") != _FORMAT:
        return None
    only_scheme(found, _check_group)
    return CheckpointForm(_take_matrices, note=_NOTE)


def _check_group(where: str, group: Mapping[str, Any]) -> None:
    weights, activations = group.get("weights", {}), group.get("input_activations")
    if not _are_four_bit_floats(weights):
        raise unsupported(f"{where}.weights", weights, f"symmetric 4-bit floats, {INSTEAD}")
    if weights.get("group_size", _BLOCK) != _BLOCK:
        raise unsupported(f"{where}.weights.group_size", weights["group_size"], str(_BLOCK))
    if activations is not None and not _are_four_bit_floats(activations):
        raise unsupported(f"{where}.input_activations", activations, "symmetric 4-bit floats or none")


def _are_four_bit_floats(table: Any) -> bool:
    match table:
        case {"num_bits": 4, "type": "float"}:
            return table.get("symmetric", True) is True
    return False


CHECKPOINTS = CheckpointForms((), _read_config, compressed=f"4-bit floats with `format` {_FORMAT}")
