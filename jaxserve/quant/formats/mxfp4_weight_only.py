"""MXFP4 (OCP Microscaling Formats, version 1.0) for the matrices of experts, upcast in the matmul; checkpoints of gpt-oss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np

from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.checkpoint import CheckpointForm, CheckpointForms
from jaxserve.quant.format import Cutting, Format, Host
from jaxserve.quant.formats import _mxfp4_tensors as mxfp4
from jaxserve.quant.formats import none
from jaxserve.quant.stored_blocks import StoredBlocks
from jaxserve.quant.tensor import Tensor

_LEAST_BLOCK: Final = 8
_NUMBER_DEVIATION: Final = 2.93
"""Standard deviation of the 16 numbers."""


class Mxfp4WeightOnly(Format):
    """Numbers of 4 bits and uint8 exponents `[blocks, out]`; matrices that are not of experts stay plain.

    Numbers are int4 `[out, in]`, on CPUs uint8 `[out, in / 2]` with the bits of two in a byte (see `jaxserve_kernels.mxfp4`). On the host exponents are
    `[out, blocks]`, and the numbers of a checkpoint are bytes. A block has 32 inputs; where devices split the inputs within
    one, it is cut into blocks of 16 or 8 with the same scale. Where that is not enough, the matrix stays plain.
    """

    name = "mxfp4-weight-only"
    bits: ClassVar[int] = 4
    only_experts: ClassVar[bool] = True

    def __init__(self) -> None:
        self.cutting = Cutting(_is_stored)

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        """Return uint8 on CPUs: jax 0.10 has no layout for int4 there that its compiled programs would take."""
        return np.dtype(np.uint8 if platform == "cpu" else ml_dtypes.int4)

    def has_native_matmul(self, weights: np.dtype) -> bool:
        return mxfp4.has_native_kernel() and none.FORMAT.has_native_matmul(weights)

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        size = math.gcd(mxfp4.BLOCK, spec.in_dim // spec.num_input_shards)
        if spec.num_experts is None or size < _LEAST_BLOCK:
            return none.FORMAT.declare(spec)
        dtype = self.values_dtype(spec.weights, spec.platform)
        num_columns = spec.in_dim // 2 if dtype == np.uint8 else spec.in_dim
        return QuantArray(
            self,
            spec.array((spec.out_dim, num_columns), spec.axes, dtype),
            spec.array((spec.in_dim // size, spec.out_dim), spec.axes[::-1], np.uint8),
        )

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        assert declared.scales is not None, "every block has a scale"
        codes, exponents = mxfp4.quantize(weights, weights.shape[1] // declared.scales.shape[-2])
        return QuantArray(self, _as(codes, declared.values.dtype), exponents)

    def keep(self, stored: Host, declared: QuantArray[ArraySpec]) -> Host | None:
        """Keep the stored bits, and cut stored blocks into those that are declared."""
        if stored.format is not self or stored.scales is None or declared.scales is None:
            return None
        cut = declared.scales.shape[-2] // stored.scales.shape[1]
        values = stored.values
        if values.dtype != declared.values.dtype:
            values = _as(mxfp4.unpacked(values), declared.values.dtype)
        return QuantArray(self, values, stored.scales if cut == 1 else stored.scales.repeat(cut, axis=1))

    def convert(self, tensor: Tensor, declared: QuantArray[ArraySpec]) -> Host:
        if isinstance(tensor, StoredBlocks) and tensor.kind == "MXFP4":
            tensor = QuantArray(self, *mxfp4.from_gguf(tensor))
        return super().convert(tensor, declared)

    def dequantize(self, stored: Host) -> np.ndarray:
        """Return `[out, in]` in bfloat16, which holds every product of a number and a scale but the largest."""
        assert stored.scales is not None, "every block has a scale"
        numbers = mxfp4.numbers_of(mxfp4.unpacked(stored.values))
        blocks = numbers.reshape(*stored.scales.shape, -1)  # a view: `numbers` changes with it
        blocks *= mxfp4.scales_of(stored.scales)[:, :, None]
        return numbers.astype(ml_dtypes.bfloat16)

    def to_device(self, host: Host) -> Host:
        assert host.scales is not None, "every block has a scale"
        return QuantArray(self, host.values, host.scales.swapaxes(-1, -2))

    def random(self, noise: np.ndarray, declared: QuantArray[ArraySpec], deviation: float) -> Host:
        """Return random numbers under one scale."""
        assert declared.scales is not None, "every block has a scale"
        bits = np.resize(noise.view(np.uint8).reshape(-1, noise.dtype.itemsize)[:, 0], declared.values.shape)
        is_packed = declared.values.dtype == np.uint8
        exponent = round(math.log2(deviation / _NUMBER_DEVIATION)) + mxfp4.BIAS
        exponents = np.full(declared.scales.shape, exponent, np.uint8)
        return QuantArray(self, bits if is_packed else mxfp4.as_places(bits & 15), exponents)

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        if platform != "cpu" or mxfp4.has_native_kernel():
            return ()
        return (
            "experts in MXFP4 save memory here but no time: every step upcasts them first; --quantization none does it once",
        )


def _is_stored(tensor: Tensor) -> bool:
    if isinstance(tensor, StoredBlocks):
        return tensor.kind == "MXFP4"
    return isinstance(tensor, QuantArray) and isinstance(tensor.format, Mxfp4WeightOnly)


def _as(codes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return mxfp4.packed(codes) if dtype == np.uint8 else mxfp4.as_places(codes)


FORMAT = Mxfp4WeightOnly()


def _read_config(found: Mapping[str, Any]) -> CheckpointForm | None:
    if found.get("quant_method") != "mxfp4":
        return None
    take = partial(mxfp4.take_matrices, partial(QuantArray, FORMAT))
    return CheckpointForm(take, CheckpointQuantization(FORMAT.name))


CHECKPOINTS = CheckpointForms(("mxfp4",), _read_config)
