"""int4 weights with one scale per output and group of neighbouring inputs; checkpoints of GPTQ, AWQ, compressed-tensors.

The value of a group that is farthest from zero becomes -8, the one of the sixteen numbers that has no opposite: scales
may be negative. That makes steps an eighth of it instead of a seventh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.checkpoint import CheckpointForm, CheckpointForms, Read, ReadMatrix
from jaxserve.quant.format import Cutting, Format, Host
from jaxserve.quant.formats import int8_weight_only
from jaxserve.quant.formats._int4_config import Int4Layout, read_config
from jaxserve.quant.formats._int4_tensors import PackedMatrix, take_matrix
from jaxserve.quant.tensor import Tensor, TensorInfo, scaled

GROUP_SIZES: Final = (128, 64, 32)
"""Inputs that may share a scale, the preferred number first."""
_NOTE: Final = (
    "4-bit weights whose groups are no neighbours (act-order) are dequantised as they are loaded; --quantization "
    "int4-weight-only keeps 4 bits, rounded again in groups of neighbours"
)


class Int4WeightOnly(Format):
    """Values `[out, in]`, scales `[groups, out]` and perhaps float32 offsets `[groups, out]`: scale * value + offset.

    On the host scales and offsets are `[out, groups]`. Matrices whose inputs no group divides, and tables, are int8.
    """

    name = "int4-weight-only"
    bits = 4
    largest = 7

    def __init__(self) -> None:
        self.cutting = Cutting(_is_stored)

    def for_tables(self, *, is_stored: bool) -> Format:
        return int8_weight_only.FORMAT

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        """Return int8 on CPUs: jax 0.10 has no layout for int4 there that its compiled programs would take."""
        return np.dtype(np.int8 if platform == "cpu" else ml_dtypes.int4)

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        shard, stored = spec.in_dim // spec.num_input_shards, spec.group_size or GROUP_SIZES[0]
        size = next((size for size in GROUP_SIZES if stored % size == 0 and shard % size == 0), None)
        if size is None:
            return int8_weight_only.FORMAT.declare(spec)
        groups, axes = (spec.in_dim // size, spec.out_dim), spec.axes[::-1]
        return QuantArray(
            self,
            spec.array((spec.out_dim, spec.in_dim), spec.axes, self.values_dtype(spec.weights, spec.platform)),
            spec.array(groups, axes, spec.activations),
            spec.array(groups, axes, np.float32) if spec.has_offsets else None,
        )

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        """Round to nearest under the scales as their dtype rounds them."""
        assert declared.scales is not None, "every group has a scale"
        num_groups = declared.scales.shape[-2]
        scales = group_scales(weights, num_groups, declared.scales.dtype)
        values = quantize_groups(weights, scales).astype(declared.values.dtype, copy=False)
        offsets = None if declared.offsets is None else np.zeros(scales.shape, declared.offsets.dtype)
        return QuantArray(self, values, scales, offsets)

    def keep(self, stored: Host, declared: QuantArray[ArraySpec]) -> Host | None:
        """Cut stored groups into those that are declared."""
        if stored.format is not self or stored.scales is None or declared.scales is None:
            return None
        cut = declared.scales.shape[-2] // stored.scales.shape[1]
        scales = stored.scales.repeat(cut, axis=1)
        offsets = None
        if declared.offsets is not None:
            found = np.zeros(scales.shape) if stored.offsets is None else stored.offsets.repeat(cut, axis=1)
            offsets = found.astype(declared.offsets.dtype)
        values = stored.values.astype(declared.values.dtype, copy=False)
        return QuantArray(self, values, scales.astype(declared.scales.dtype), offsets)

    def convert(self, tensor: Tensor, declared: QuantArray[ArraySpec]) -> Host:
        return super().convert(tensor.unpacked() if isinstance(tensor, StoredInt4) else tensor, declared)

    def dequantize(self, stored: Host) -> np.ndarray:
        assert stored.scales is not None, "every group has a scale"
        wide: np.ndarray = stored.values.astype(np.float32, order="C")
        by_group = wide.reshape(*stored.scales.shape, -1)  # a view: `wide` changes with it
        by_group *= stored.scales[:, :, None]
        if stored.offsets is not None:
            by_group += stored.offsets[:, :, None]
        return wide

    def to_device(self, host: Host) -> Host:
        scales, offsets = (None if each is None else each.swapaxes(-1, -2) for each in (host.scales, host.offsets))
        return QuantArray(self, host.values, scales, offsets)

    def matmuls(
        self, x: Any, weights: Sequence[QuantArray[Any]], num_rows: Any, backend: Any, dtype: Any = "float32"
    ) -> list[Any]:
        from jaxserve_kernels.matmul import offset_matmul

        made = super().matmuls(x, weights, num_rows, backend)
        parts = (each.offsets for each in weights)
        added = (y if part is None else y + offset_matmul(x, part) for y, part in zip(made, parts, strict=True))
        return [y.astype(dtype) for y in added]

    def grouped_matmul(self, x: Any, weight: QuantArray[Any], group_sizes: Any, backend: Any) -> Any:
        import jax.numpy as jnp
        from jaxserve_kernels.grouped_matmul import grouped_matmul

        result = super().grouped_matmul(x, weight, group_sizes, backend)
        if weight.offsets is None:
            return result
        offsets = weight.offsets.swapaxes(1, 2)  # (E, O, G)
        sums = x.reshape(len(x), offsets.shape[2], -1).astype(jnp.float32).sum(-1)
        return result + grouped_matmul(sums, offsets, group_sizes, backend=backend)

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        if platform != "cpu":
            return ()
        return (
            "4-bit weights take 8 here, and no less time: every step upcasts them first; --quantization "
            "int8-weight-only is as small and has a kernel of its own",
        )


def _is_stored(tensor: Tensor) -> bool:
    return isinstance(tensor, StoredInt4)


FORMAT = Int4WeightOnly()


def group_scales(weights: np.ndarray, num_groups: int, dtype: np.dtype) -> np.ndarray:
    """Return [O, G] of weights [O, I]; 1 for a group of zeros."""
    grouped = _grouped(weights, num_groups)
    farthest = np.abs(grouped).argmax(axis=2, keepdims=True)
    scales = (np.take_along_axis(grouped, farthest, axis=2)[:, :, 0] / np.float32(-8)).astype(dtype)
    scales[scales == 0] = 1
    return scales


def quantize_groups(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return int4 [O, I]: the numbers nearest to the weights under these scales [O, G].

    The exception is a weight that lies opposite to the farthest of its group and is rounded down to 7 steps.
    """
    steps = scales.astype(np.float32)[:, :, None]
    numbers = np.clip(np.rint(_grouped(weights, scales.shape[1]) / steps), -8, 7)
    return numbers.astype(ml_dtypes.int4).reshape(weights.shape)


def _grouped(weights: np.ndarray, num_groups: int) -> np.ndarray:
    """Return float32 [O, G, I / G]."""
    return weights.astype(np.float32, copy=False).reshape(len(weights), num_groups, -1)


def _take_matrices(layout: Int4Layout, tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    suffix, matrices = layout.suffix, dict[str, ReadMatrix]()
    for module in [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]:
        name, matrix = f"{module}.weight", take_matrix(tensors, module, layout)
        tensors[name] = replace(
            matrix.numbers,
            name=name,
            shape=matrix.shape,
            stored_dtype="I4",
            num_stored_bytes=matrix.num_stored_bytes,
            is_quantized=not layout.is_ordered,
        )
        matrices[name] = matrix.dequantize if layout.is_ordered else partial(_read, matrix)
    return matrices


@dataclass(frozen=True, slots=True)
class StoredInt4:
    """A packed matrix of a checkpoint, or some of its outputs and inputs: unpacked when it is needed."""

    matrix: PackedMatrix
    read: Read
    outputs: range
    inputs: range

    def __getitem__(self, index: Any) -> StoredInt4 | Host:
        """Return some outputs: unpacked if they are no range."""
        if isinstance(index, slice) and index.step in (None, 1):
            return replace(self, outputs=self.outputs[index])
        return self.unpacked()[index]

    def columns(self, inputs: range, num_inputs: int) -> StoredInt4 | None:
        """See `QuantizedTensor.columns`."""
        if scaled(inputs, num_inputs, self.matrix.num_groups) is None:
            return None
        return replace(self, inputs=self.inputs[inputs.start : inputs.stop])

    def unpacked(self) -> Host:
        """Return the numbers, scales and offsets."""
        groups = scaled(self.inputs, self.matrix.shape[1], self.matrix.num_groups)
        assert groups is not None, "see `columns`"
        part = slice(self.outputs.start, self.outputs.stop), slice(groups.start, groups.stop)
        numbers = self.matrix.read_numbers(self.read, self.outputs, self.inputs)
        return QuantArray(
            FORMAT, numbers, self.matrix.read_scales(self.read, part), self.matrix.read_offsets(self.read, part)
        )

    def dequantize(self) -> np.ndarray:
        """Return `[out, in]` in float32."""
        return FORMAT.dequantize(self.unpacked())


def _read(matrix: PackedMatrix, read: Read) -> StoredInt4:
    return StoredInt4(matrix, read, range(matrix.shape[0]), range(matrix.shape[1]))


def _read_form(found: Mapping[str, Any]) -> CheckpointForm | None:
    layout = read_config(found)
    if layout is None:
        return None
    kept = CheckpointQuantization(FORMAT.name, group_size=layout.group_size, has_offsets=layout.has_zeros)
    return CheckpointForm(partial(_take_matrices, layout), None if layout.is_ordered else kept, _NOTE)


CHECKPOINTS = CheckpointForms(("gptq", "awq"), _read_form, compressed="4-bit integers with `format` pack-quantized")
