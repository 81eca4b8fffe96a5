"""Ternary weights of BitNet (arXiv 2402.17764): -1, 0 or 1 times one scale for each matrix, served as int8 with the same values.

`quant_method` is `bitnet`. A packed `NAME.weight` has bytes [out / 4, in]: the bits 2i and 2i + 1 of row r are those of output
i * out / 4 + r, plus 1, as transformers stores them. `NAME.weight_scale` is one number, a factor if `linear_class` is `autobitlinear`
and a divisor if it is `bitlinear`. With `quantization_mode` `online` the weights are floats, and every matmul rounds them to ternary ones:
so are they here, once. Activations are rounded to 8 bits token by token, as the models are trained, and as `int8` computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.quant.array import QuantArray
from jaxserve.quant.checkpoint import CheckpointForm, Read, ReadMatrix, unsupported
from jaxserve.quant.format import Host
from jaxserve.quant.formats._rows import pop_scale
from jaxserve.quant.formats.int8 import FORMAT
from jaxserve.quant.tensor import TensorInfo

METHOD: Final = "bitnet"
"""Value of `quant_method`."""
_PACKED_DTYPE: Final = "U8"
_PACKED_ROWS: Final = 4
"""Outputs that share a byte."""
_SMALLEST_MEAN: Final = 1e-5
_MATRIX: Final = ".weight"
_FLOATS: Final = ("F32", "F16", "BF16")
_TABLES: Final = ("embed_tokens", "lm_head")
"""Matrices that are never ternary, by the last component of their modules' names."""


def _take_packed(tensors: dict[str, TensorInfo], *, divides: bool) -> dict[str, ReadMatrix]:
    for info in tensors.values():
        if info.stored_dtype in _FLOATS and info.name.endswith(_MATRIX) and f"{info.name}_scale" in tensors:
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)}: expected ternary weights packed four to a byte, found {info.stored_dtype}"
            )
    matrices = [info for info in tensors.values() if info.stored_dtype == _PACKED_DTYPE and info.name.endswith(_MATRIX)]
    return {matrix.name: _take(tensors, matrix, divides=divides) for matrix in matrices}


def _take(tensors: dict[str, TensorInfo], matrix: TensorInfo, *, divides: bool) -> ReadMatrix:
    scale = pop_scale(tensors, matrix, "_scale")
    if scale.shape not in ((), (1,)):
        raise CheckpointError(
            f"{scale.file}: tensor {shown(scale.name)}: expected one scale, found shape {scale.shape}"
        )
    shape = (_PACKED_ROWS * matrix.shape[0], *matrix.shape[1:])
    num_bytes = matrix.num_stored_bytes + scale.num_stored_bytes
    tensors[matrix.name] = replace(matrix, shape=shape, num_stored_bytes=num_bytes, is_quantized=True)
    return partial(_read_packed, matrix.name, scale.name, divides)


def _read_packed(name: str, scale_name: str, divides: bool, read: Read) -> Host:
    packed, scale = read(name), np.float32(read(scale_name).reshape(()))
    values = np.concatenate([(packed >> 2 * part) & 3 for part in range(_PACKED_ROWS)]).astype(np.int8) - np.int8(1)
    return _ternary(values, 1 / scale if divides else scale)


def _take_floats(tensors: dict[str, TensorInfo], *, plain: tuple[str, ...]) -> dict[str, ReadMatrix]:
    matrices: dict[str, ReadMatrix] = {}
    for info in [*tensors.values()]:
        module = info.name.removesuffix(_MATRIX)
        is_matrix = info.name.endswith(_MATRIX) and len(info.shape) == 2 and info.stored_dtype in _FLOATS
        if is_matrix and not module.endswith(_TABLES) and not any(_names(each, module) for each in plain):
            tensors[info.name] = replace(info, is_quantized=True)
            matrices[info.name] = partial(_read_rounded, info.name)
    return matrices


def _names(key: str, module: str) -> bool:
    """Return True if `key`, of `modules_to_not_convert`, names the module, a part of the model that it is in, or the end of its name."""
    return f"{module}.".startswith(f"{key}.") or module.endswith(key)


def _read_rounded(name: str, read: Read) -> Host:
    weights = read(name).astype(np.float32)
    mean = np.maximum(np.abs(weights).mean(dtype=np.float32), np.float32(_SMALLEST_MEAN))
    return _ternary(np.clip(np.rint(weights * (1 / mean)), -1, 1).astype(np.int8), mean)


def _ternary(values: np.ndarray, scale: np.float32) -> Host:
    return QuantArray(FORMAT, values, np.full(values.shape[:1], scale, np.float32))


def read_ternary(found: Mapping[str, Any]) -> CheckpointForm | None:
    """Read `quantization_config`; None: it is not BitNet's. Raises CheckpointError for a value that is not computed."""
    if found.get("quant_method") != METHOD:
        return None
    kind, mode = found.get("linear_class", "bitlinear"), found.get("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear"):
        raise unsupported(".linear_class", kind, "bitlinear and autobitlinear")
    if mode not in ("offline", "online"):
        raise unsupported(".quantization_mode", mode, "offline and online")
    if found.get("use_rms_norm"):
        raise unsupported(".use_rms_norm", found["use_rms_norm"], "false")
    plain = found.get("modules_to_not_convert") or []
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise unsupported(".modules_to_not_convert", plain, "a list of names of modules")
    if kind == "autobitlinear" and mode == "online":
        take = partial(_take_floats, plain=tuple(plain))
    else:
        take = partial(_take_packed, divides=kind == "bitlinear")
    return CheckpointForm(take, CheckpointQuantization("int8"))
