"""e4m3 weights with a scale for every block of outputs and inputs, as DeepSeek-V3 and Qwen3-FP8 are published.

A block's scale is kept for each of its outputs: then a matrix can be cut at any output, whether rows are fused, reordered, or
split over devices. Along the inputs blocks are cut into equal groups, so that neither the end of a matrix nor that of a device's
share is within one.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np

from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.format import Format, Host
from jaxserve.quant.formats import none

DTYPE: Final[np.dtype] = np.dtype(ml_dtypes.float8_e4m3fn)
_INPUTS: Final = 128
"""Inputs that share a scale if the checkpoint does not say."""
_LEAST_GROUP: Final = 16
"""Smaller groups would spend more than a quarter of the weights' bytes on scales."""
_ADA: Final = (8, 9)
"""Compute capability of the first CUDA devices that convert 8-bit floats."""


class Fp8BlockWeightOnly(Format):
    """Values e4m3 `[out, in]` and float32 scales `[groups, out]`, on the host `[out, groups]`.

    A matrix stays plain if no group of 16 or more inputs divides those of a device. Weights that are quantised here have a scale
    for each output and group.
    """

    name = "fp8-block-weight-only"
    bits: ClassVar[int] = 8
    largest = 448
    is_by_row: ClassVar[bool] = True

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        return DTYPE

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        size = _group(spec.group_size or _INPUTS, spec.in_dim, spec.in_dim // spec.num_input_shards)
        if size < _LEAST_GROUP:
            return none.FORMAT.declare(spec)
        return QuantArray(
            self,
            spec.array((spec.out_dim, spec.in_dim), spec.axes, DTYPE),
            spec.array((spec.in_dim // size, spec.out_dim), spec.axes[::-1], np.float32),
        )

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        """Round to nearest, the largest weight of each output's group to the largest number. Groups of zeros get the scale 1."""
        assert declared.scales is not None, "every group has a scale"
        groups = weights.astype(np.float32, copy=False).reshape(len(weights), declared.scales.shape[-2], -1)
        largest = np.abs(groups).max(axis=2)
        scales = np.where(largest == 0, np.float32(1), largest / np.float32(self.largest))
        return QuantArray(self, (groups / scales[:, :, None]).astype(DTYPE).reshape(weights.shape), scales)

    def keep(self, stored: Host, declared: QuantArray[ArraySpec]) -> Host | None:
        """Cut stored blocks into the groups that are declared; a scale of an output is that of all its groups."""
        if stored.values.dtype != DTYPE or stored.scales is None or declared.scales is None:
            return None
        scales = stored.scales if stored.scales.ndim == 2 else stored.scales[:, None]
        cut, rest = divmod(declared.scales.shape[-2], scales.shape[1])
        if rest:
            return None
        return QuantArray(self, stored.values, scales if cut == 1 else scales.repeat(cut, axis=1))

    def dequantize(self, stored: Host) -> np.ndarray:
        assert stored.scales is not None, "every group has a scale"
        wide: np.ndarray = stored.values.astype(np.float32, order="C")
        by_group = wide.reshape(*stored.scales.shape, -1)  # a view: `wide` changes with it
        by_group *= stored.scales[:, :, None]
        return wide

    def to_device(self, host: Host) -> Host:
        assert host.scales is not None, "every group has a scale"
        return QuantArray(self, host.values, host.scales.swapaxes(-1, -2))

    def lookup(self, table: QuantArray[Any], rows: Any, dtype: Any, backend: Any = "reference") -> Any:
        import jax.numpy as jnp

        assert table.scales is not None, "every group has a scale"
        scales = table.scales[:, rows].T  # (T, G)
        groups = table.values[rows].astype(jnp.float32).reshape(*scales.shape, -1)
        return (groups * scales[:, :, None]).reshape(len(scales), -1).astype(dtype)

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        if platform != "cpu" and (capability is None or capability >= _ADA):
            return ()
        return (
            "fp8 weights in blocks save memory here but no time: this device has no arithmetic for them, every step upcasts "
            "them first; --quantization none does it once",
        )


FORMAT = Fp8BlockWeightOnly()


def stored_scales(blocks: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """Return float32 scales `[out, groups]` of a stored matrix: for each output, and for groups that end where its inputs do.

    blocks: the stored scales, of blocks of as many outputs and inputs as `block` says; the last ones may be smaller.
    """
    (height, width), (num_outputs, num_inputs) = block, shape
    size = _group(width, num_inputs, num_inputs)
    by_group = np.repeat(blocks.astype(np.float32), max(1, width // size), axis=1)[:, : num_inputs // size]
    return np.repeat(by_group, height, axis=0)[:num_outputs]


def _group(width: int, num_inputs: int, num_own: int) -> int:
    """Return the inputs of a group: as many as divide those of a device, `num_own`, and never cut a block of `width` inputs."""
    return num_own if num_inputs <= width else math.gcd(width, num_own)
