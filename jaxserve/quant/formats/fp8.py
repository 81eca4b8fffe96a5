"""e4m3 weights, and activations quantised to e4m3 token by token; checkpoints that are stored in fp8.

A stored scale multiplies the values (`weight_scale`, and `weight_scale_inv` too) and belongs to a matrix, to an output,
or to a block of outputs and inputs. Matrices of experts that are stored together, `[E, out, in]`, have scales with one more axis, or one
for each expert (Mistral Small 4). The tensors decide which matrices are quantised, not the lists and patterns of
`quantization_config`. With `expert_dtype` fp4 (DeepSeek-V4) the experts are MXFP4: I8 `[out, in / 2]` with an F8_E8M0 scale for 32 inputs.
Then they are kept, and matrices in fp8 are dequantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

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
    CheckpointForms,
    Read,
    ReadMatrix,
    are_symmetric,
    has_weights,
    only_scheme,
    unsupported,
)
from jaxserve.quant.format import Host
from jaxserve.quant.formats import _mxfp4_tensors as mxfp4
from jaxserve.quant.formats import fp8_block_weight_only as blocks
from jaxserve.quant.formats import mxfp4_weight_only
from jaxserve.quant.formats._rows import RowFormat, has_rows, pop_scale, read_rows
from jaxserve.quant.tensor import TensorInfo, as_floats

_STORED_DTYPE: Final = "F8_E4M3"
_FP4_DTYPE, _FP4_SCALES = "I8", ("F8_E8M0", "U8")
_SCALE_SUFFIXES: Final = ("_scale", "_scale_inv")
_UNUSED: Final = frozenset({"input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale"})
"""Static scales of activations, which are scaled token by token. Scales of the KV cache that are used were taken before."""
_UNUSED_OF_EXPERTS: Final = ("_proj_input_scale", "_proj_activation_scale")
"""Ends of the names of such scales beside matrices of experts that are stored together."""
_DEFAULT_BLOCK: Final = (128, 128)
_ADA: Final = (8, 9)
"""Compute capability of the first CUDA devices with arithmetic for 8-bit floats."""


class Fp8(RowFormat):
    """e4m3 weights and activations."""

    name = "fp8"
    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    largest = 448
    quantizes_activations = True
    arithmetic: ClassVar[str | None] = "fp8"

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        if platform != "cpu" and (capability is None or capability >= _ADA):
            return ()
        return (
            "fp8 weights save memory here but no time: this device has no arithmetic for them, every step upcasts them "
            "first; --quantization none does it once",
        )


FORMAT = Fp8()


class _Scheme(NamedTuple):
    """The kind of matrices and scales in a checkpoint."""

    quantizes_activations: bool
    has_blocks: bool
    """True if scales belong to blocks."""
    block: tuple[int, int]
    """Outputs and inputs of a block."""
    has_fp4: bool = False
    """True if experts are MXFP4."""

    @property
    def kept(self) -> CheckpointQuantization:
        """The format that stores such matrices as they are; experts only if these are MXFP4."""
        if self.has_fp4:
            return CheckpointQuantization(mxfp4_weight_only.FORMAT.name)
        if self.has_blocks:
            return CheckpointQuantization(blocks.FORMAT.name, group_size=self.block[1])
        return CheckpointQuantization("fp8" if self.quantizes_activations else "fp8-weight-only")


def _take_matrices(scheme: _Scheme, tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    for name in [name for name in tensors if name.rpartition(".")[2] in _UNUSED or name.endswith(_UNUSED_OF_EXPERTS)]:
        del tensors[name]
    matrices = [info for info in tensors.values() if info.stored_dtype == _STORED_DTYPE]
    taken = {matrix.name: _take(tensors, matrix, scheme) for matrix in matrices}
    packed = [info for info in tensors.values() if scheme.has_fp4 and info.stored_dtype == _FP4_DTYPE]
    return taken | {matrix.name: _take_fp4(tensors, matrix) for matrix in packed}


def take_floats(tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    """Take matrices in fp8 as `CheckpointForm.take_matrices` does, of a checkpoint that has others in fewer bits: they are dequantised as they
    are read."""
    taken = _take_matrices(_Scheme(False, True, _DEFAULT_BLOCK), tensors)
    for name in taken:
        tensors[name] = replace(tensors[name], is_quantized=False)
    return {name: partial(_read_floats, read_matrix) for name, read_matrix in taken.items()}


def _read_floats(read_matrix: ReadMatrix, read: Read) -> np.ndarray:
    return as_floats(read_matrix(read))


def _take_fp4(tensors: dict[str, TensorInfo], matrix: TensorInfo) -> ReadMatrix:
    scale = pop_scale(tensors, matrix, *_SCALE_SUFFIXES)
    *outputs, num_bytes = matrix.shape
    shape = (*outputs, 2 * num_bytes)
    if (
        len(outputs) != 1
        or scale.shape != (*outputs, 2 * num_bytes // mxfp4.BLOCK)
        or scale.stored_dtype not in _FP4_SCALES
    ):
        raise CheckpointError(
            f"{scale.file}: tensor {shown(scale.name)}: expected an {_FP4_SCALES[0]} scale for each {mxfp4.BLOCK} inputs of {shape}, "
            f"found {scale.stored_dtype} of shape {scale.shape}"
        )
    num_stored = matrix.num_stored_bytes + scale.num_stored_bytes
    tensors[matrix.name] = replace(
        matrix, shape=shape, stored_dtype="MXFP4", num_stored_bytes=num_stored, is_quantized=True
    )
    return partial(_read_fp4, matrix.name, scale.name)


def _read_fp4(matrix: str, scale: str, read: Read) -> Host:
    values, exponents = (read(name).view(np.uint8) for name in (matrix, scale))
    return QuantArray(mxfp4_weight_only.FORMAT, values, exponents)


def _take(tensors: dict[str, TensorInfo], matrix: TensorInfo, scheme: _Scheme) -> ReadMatrix:
    scale = pop_scale(tensors, matrix, *_SCALE_SUFFIXES)
    num_bytes = matrix.num_stored_bytes + scale.num_stored_bytes
    tensors[matrix.name] = replace(matrix, num_stored_bytes=num_bytes, is_quantized=True)
    *experts, num_outputs, num_inputs = matrix.shape if len(matrix.shape) > 1 else (0, 0)
    height, width = scheme.block
    is_in_blocks = scale.shape == (*experts, -(-num_outputs // height), -(-num_inputs // width))
    if has_rows(matrix, scale) and not (is_in_blocks and scheme.has_blocks):
        return partial(read_rows, FORMAT, matrix, scale)
    if not is_in_blocks:
        raise CheckpointError(
            f"{scale.file}: tensor {shown(scale.name)}: expected one scale, one for each output of {matrix.shape} "
            f"or for each block of {scheme.block}, found shape {scale.shape}"
        )
    return partial(_StackedBlocks if experts else _read_blocks, matrix, scale, scheme.block)


def _read_blocks(matrix: TensorInfo, scale: TensorInfo, block: tuple[int, int], read: Read) -> Host:
    """Return a stored matrix with a scale for each block."""
    scales = blocks.stored_scales(read(scale.name), block, matrix.shape)
    return QuantArray(blocks.FORMAT, read(matrix.name), scales)


@dataclass(frozen=True, slots=True)
class _StackedBlocks:
    """Matrices of experts that are stored together, with a scale for each block. Scales of an expert are widened when it is read."""

    matrix: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]
    read: Read

    def __getitem__(self, expert: int) -> Host:
        scales = blocks.stored_scales(self.read(self.scale.name)[expert], self.block, self.matrix.shape[1:])
        return QuantArray(blocks.FORMAT, self.read(self.matrix.name)[expert], scales)

    def columns(self, inputs: range, num_inputs: int) -> None:
        """Return None: matrices are taken one by one."""

    def dequantize(self) -> np.ndarray:
        """Return `[experts, out, in]` in float32."""
        return np.stack([self[expert].dequantize() for expert in range(self.matrix.shape[0])])


def _read_config(found: Mapping[str, Any]) -> CheckpointForm | None:
    match found.get("quant_method"):
        case "fp8":
            scheme = _read_fp8(found)
        case method if method == MODELOPT and found.get("quant_algo") in FP8_ALGORITHMS:
            scheme = _Scheme(True, False, _DEFAULT_BLOCK)
        case method if method == COMPRESSED_TENSORS and has_weights(found, "float", 8):
            if has_weights(found, "float", 4):  # see `take_floats`
                return None
            scheme = only_scheme(found, _read_group)
        case _:
            return None
    return CheckpointForm(partial(_take_matrices, scheme), scheme.kept)


def _read_fp8(found: Mapping[str, Any]) -> _Scheme:
    scheme = found.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise unsupported(".activation_scheme", scheme, "dynamic and static")
    experts = found.get("expert_dtype", "fp8")
    if experts not in ("fp8", "fp4"):
        raise unsupported(".expert_dtype", experts, "fp8 and fp4")
    block = found.get("weight_block_size")
    size = _DEFAULT_BLOCK if block is None else _block("weight_block_size", block)
    return _Scheme(True, block is not None, size, has_fp4=experts == "fp4")


def check_group(where: str, group: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `take_floats` does not read this group of compressed-tensors."""
    block = _read_group(where, group).block
    if block != _DEFAULT_BLOCK:
        raise unsupported(f"{where}.weights.block_structure", [*block], str([*_DEFAULT_BLOCK]))


def _read_group(where: str, group: Mapping[str, Any]) -> _Scheme:
    weights, activations = group.get("weights", {}), group.get("input_activations")
    if not are_symmetric(weights, "float", 8):
        raise unsupported(f"{where}.weights", weights, f"symmetric 8-bit floats, {INSTEAD}")
    if activations is not None and not are_symmetric(activations, "float", 8):
        raise unsupported(f"{where}.input_activations", activations, "8-bit floats or none")
    strategy = weights.get("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise unsupported(f"{where}.weights.strategy", strategy, "tensor, channel and block")
    block = weights.get("block_structure") if strategy == "block" else None
    size = _DEFAULT_BLOCK if block is None else _block("config_groups block_structure", block)
    return _Scheme(activations is not None, strategy == "block", size)


def _block(key: str, value: object) -> tuple[int, int]:
    match value:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise unsupported(f".{key}", value, "two positive numbers")


CHECKPOINTS = CheckpointForms(("fp8",), _read_config, compressed="8-bit floats")
