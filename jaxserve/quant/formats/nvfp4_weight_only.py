"""NVFP4 matrices, upcast in the matmul; checkpoints of compressed-tensors and of NVIDIA's Model Optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from jaxserve_kernels.tpu_words import LANES, NUMBERS_OF_WORD, UNIT, pack_numbers

from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.checkpoint import MODELOPT, CheckpointForms
from jaxserve.quant.format import Cutting, Format, Host
from jaxserve.quant.formats import _nvfp4_tensors as nvfp4
from jaxserve.quant.formats import int8_weight_only, none
from jaxserve.quant.formats._mxfp4_tensors import has_native_kernel, packed
from jaxserve.quant.tensor import Tensor

if TYPE_CHECKING:
    from jaxserve_kernels.nvfp4 import TwoLevelScales

_LEAST_BLOCK: Final = 8
_HOPPER: Final = (9, 0)
"""Compute capability of the GPUs that have kernels."""
_NUMBER_DEVIATION: Final = 2.93
"""Standard deviation of the 16 numbers."""


class Nvfp4WeightOnly(Format):
    """Numbers uint8 `[out, in / 2]`, scales e4m3 `[blocks, out]`, and float32 scales of the matrix `[2, out]`.

    See `jaxserve_kernels.nvfp4`. On the host outputs are the first dimension of all three. On TPUs the numbers of a matrix are words,
    int32 `[in / 8, out]`, if a device has whole ones. A block has 16 inputs; where devices
    split the inputs within one, it is cut into two of 8 with the same scale. Where that is not enough, the matrix stays plain.
    """

    name = "nvfp4-weight-only"
    bits: ClassVar[int] = 4

    def __init__(self, *, are_words: bool = False) -> None:
        self._are_words = are_words
        self.cutting = Cutting(_is_stored, outputs_axis=1 if are_words else 0)

    def for_tables(self, *, is_stored: bool) -> Format:
        """Return int8 for tables that are rounded here: the head shows rounding most of all matrices."""
        return self if is_stored else int8_weight_only.FORMAT

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        return np.dtype(np.uint8)

    def has_native_matmul(self, weights: np.dtype) -> bool:
        return has_native_kernel() and none.FORMAT.has_native_matmul(weights)

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        size = math.gcd(nvfp4.BLOCK, spec.in_dim // spec.num_input_shards)
        if size < _LEAST_BLOCK:
            return none.FORMAT.declare(spec)
        out_axis, in_axis = spec.axes
        are_words = spec.has_words
        values = spec.array((spec.out_dim, spec.in_dim // 2), spec.axes, np.uint8)
        if are_words:
            values = spec.array((spec.in_dim // NUMBERS_OF_WORD, spec.out_dim), spec.axes[::-1], np.int32)
        return QuantArray(
            _IN_WORDS if are_words else self,
            values,
            spec.array((spec.in_dim // size, spec.out_dim), (in_axis, out_axis), nvfp4.E4M3),
            matrix_scales=spec.array((2, spec.out_dim), (None, out_axis), np.float32),
        )

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        assert declared.scales is not None, "every block has a scale"
        codes, scales, factor = nvfp4.quantize(weights, weights.shape[1] // declared.scales.shape[-2])
        return QuantArray(self, packed(codes), scales, matrix_scales=nvfp4.matrix_scales(len(weights), factor=factor))

    def keep(self, stored: Host, declared: QuantArray[ArraySpec]) -> Host | None:
        """Keep the stored bits, and cut stored blocks into those that are declared."""
        if not isinstance(stored.format, Nvfp4WeightOnly) or stored.scales is None or declared.scales is None:
            return None
        cut = declared.scales.shape[-2] // stored.scales.shape[1]
        scales = stored.scales if cut == 1 else stored.scales.repeat(cut, axis=1)
        return QuantArray(self, stored.values, scales, matrix_scales=stored.matrix_scales)

    def dequantize(self, stored: Host) -> np.ndarray:
        """Return `[out, in]` in float32."""
        assert stored.scales is not None and stored.matrix_scales is not None, "there are scales of both levels"
        return nvfp4.dequantize(stored.values, stored.scales, stored.matrix_scales)

    def to_device(self, host: Host) -> Host:
        assert host.scales is not None and host.matrix_scales is not None, "there are scales of both levels"
        scales, of_matrix = (each.swapaxes(-1, -2) for each in (host.scales, host.matrix_scales))
        values = _in_words(host.values) if self._are_words else host.values
        return QuantArray(self, values, scales, matrix_scales=of_matrix)

    def random(self, noise: np.ndarray, declared: QuantArray[ArraySpec], deviation: float) -> Host:
        """Return random numbers under one scale."""
        assert declared.scales is not None and declared.matrix_scales is not None, "there are scales of both levels"
        spec = declared.values
        shape = (*spec.shape[:-1], spec.shape[-1] * spec.dtype.itemsize)
        bits = np.resize(noise.view(np.uint8).reshape(-1, noise.dtype.itemsize)[:, 0], shape).view(spec.dtype)
        of_matrix = np.ones(declared.matrix_scales.shape, np.float32)
        of_matrix[..., 0, :] = deviation / _NUMBER_DEVIATION
        return QuantArray(self, bits, np.ones(declared.scales.shape, nvfp4.E4M3), matrix_scales=of_matrix)

    def matmuls(
        self, x: Any, weights: Sequence[QuantArray[Any]], num_rows: Any, backend: Any, dtype: Any = "float32"
    ) -> list[Any]:
        from jaxserve_kernels.nvfp4 import matmul

        made = (matmul(x, each.values, _both_levels(each), num_rows, backend=backend) for each in weights)
        return [y.astype(dtype) for y in made]

    def grouped_matmul(self, x: Any, weight: QuantArray[Any], group_sizes: Any, backend: Any) -> Any:
        from jaxserve_kernels.grouped_matmul import grouped_matmul

        return grouped_matmul(x, weight.values, group_sizes, _both_levels(weight), backend=backend)

    def lookup(self, table: QuantArray[Any], rows: Any, dtype: Any, backend: Any = "reference") -> Any:
        from jaxserve_kernels.matmul.tpu import take_columns
        from jaxserve_kernels.nvfp4 import TwoLevelScales, bytes_of, dequantize

        own = TwoLevelScales(*(each[:, rows] for each in _both_levels(table)))
        values = bytes_of(take_columns(table.values, rows, backend)) if self._are_words else table.values[rows]
        return dequantize(values, own, dtype)

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        if platform == "cpu" and has_native_kernel():
            return ()
        if capability == _HOPPER:
            return (
                "steps of up to 128 tokens read weights in NVFP4 as they are stored; longer ones (prompts) upcast all but those of experts first",
            )
        if platform == "tpu":
            return (
                f"weights in NVFP4 are read as they are stored, but those of matrices whose inputs on a device are no multiple of {UNIT} or whose "
                f"outputs none of {LANES}: every step upcasts these first",
            )
        return (
            "weights in NVFP4 save memory but no time: no kernel of this device multiplies with them, every step upcasts them "
            "first; --quantization none does it once",
        )


def _is_stored(tensor: Tensor) -> bool:
    return isinstance(tensor, QuantArray) and isinstance(tensor.format, Nvfp4WeightOnly)


def _in_words(values: np.ndarray) -> np.ndarray:
    """Return the words of one matrix, or of those of all experts."""
    return pack_numbers(values) if values.ndim == 2 else np.stack([pack_numbers(each) for each in values])


def _both_levels(weight: QuantArray[Any]) -> TwoLevelScales:
    from jaxserve_kernels.nvfp4 import TwoLevelScales

    assert weight.scales is not None and weight.matrix_scales is not None, "there are scales of both levels"
    return TwoLevelScales(weight.scales, weight.matrix_scales)


FORMAT = Nvfp4WeightOnly()
_IN_WORDS: Final = Nvfp4WeightOnly(are_words=True)
CHECKPOINTS = CheckpointForms(
    (MODELOPT,),
    partial(nvfp4.read_config, FORMAT),
    compressed=f"4-bit floats with `format` {nvfp4.COMPRESSED_FORMAT}",
)
