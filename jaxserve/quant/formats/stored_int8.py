"""int8 weights of compressed-tensors (`int-quantized`: W8A8, such as those after SmoothQuant): kept as they are stored.

`NAME.weight` has int8 values, `NAME.weight_scale` one scale for the matrix or one for each output. Ternary weights become the same: see
`quant.ternary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.quant.checkpoint import (
    COMPRESSED_TENSORS,
    INSTEAD,
    CheckpointForm,
    CheckpointForms,
    ReadMatrix,
    are_symmetric,
    has_weights,
    only_scheme,
    unsupported,
)
from jaxserve.quant.formats._rows import has_rows, pop_scale, read_rows
from jaxserve.quant.formats.int8 import FORMAT
from jaxserve.quant.tensor import TensorInfo
from jaxserve.quant.ternary import METHOD, read_ternary

_STORED_DTYPE: Final = "I8"
_STORED_AS: Final = (None, "int-quantized", "naive-quantized")
_UNUSED: Final = ("input_scale", "output_scale")
"""Static scales of activations: they are scaled token by token."""


def _take_matrices(tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    for name in [name for name in tensors if name.rpartition(".")[2] in _UNUSED]:
        del tensors[name]
    matrices = [info for info in tensors.values() if info.stored_dtype == _STORED_DTYPE]
    return {matrix.name: _take(tensors, matrix) for matrix in matrices}


def _take(tensors: dict[str, TensorInfo], matrix: TensorInfo) -> ReadMatrix:
    scale = pop_scale(tensors, matrix, "_scale")
    if not has_rows(matrix, scale):
        raise CheckpointError(
            f"{scale.file}: tensor {shown(scale.name)}: expected one scale or one for each output of {matrix.shape}, "
            f"found shape {scale.shape}"
        )
    num_bytes = matrix.num_stored_bytes + scale.num_stored_bytes
    tensors[matrix.name] = replace(matrix, num_stored_bytes=num_bytes, is_quantized=True)
    return partial(read_rows, FORMAT, matrix, scale)


def _read_config(found: Mapping[str, Any]) -> CheckpointForm | None:
    if found.get("quant_method") == METHOD:
        return read_ternary(found)
    if found.get("quant_method") != COMPRESSED_TENSORS or not has_weights(found, "int", 8):
        return None
    if found.get("format") not in _STORED_AS:
        raise unsupported(".format", found["format"], f"int-quantized for 8-bit integers, {INSTEAD}")
    quantizes_activations = only_scheme(found, _read_group)
    return CheckpointForm(
        _take_matrices, CheckpointQuantization("int8" if quantizes_activations else "int8-weight-only")
    )


def _read_group(where: str, group: Mapping[str, Any]) -> bool:
    """Return True if activations are quantised as well."""
    weights, activations = group.get("weights", {}), group.get("input_activations")
    if not are_symmetric(weights, "int", 8):
        raise unsupported(f"{where}.weights", weights, f"symmetric 8-bit integers, {INSTEAD}")
    if activations is not None and not are_symmetric(activations, "int", 8):
        raise unsupported(f"{where}.input_activations", activations, "symmetric 8-bit integers or none")
    strategy = weights.get("strategy", "tensor")
    if strategy not in ("tensor", "channel"):
        raise unsupported(f"{where}.weights.strategy", strategy, "tensor and channel")
    return activations is not None


CHECKPOINTS = CheckpointForms((METHOD,), _read_config, compressed="8-bit integers with `format` int-quantized")
