"""MXFP4 (OCP Microscaling Formats, version 1.0) as gpt-oss stores its experts: dequantised as it is loaded.

`NAME_blocks` has two e2m1 numbers in a byte, the first in its low half; `NAME_scales` the exponent of every 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.checkpoint import CheckpointForm, CheckpointForms, Read, ReadMatrix
from jaxserve.quant.tensor import TensorInfo

_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The e2m1 number of each four bits."""
_EXPONENT_BIAS: Final = 127
_BLOCK: Final = 32
_NOTE: Final = (
    "MXFP4 experts are dequantised as they are loaded; --quantization int4-weight-only keeps 4 bits, rounded again"
)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A tensor whose last dimension is quantised."""

    blocks: np.ndarray
    """uint8 `[..., out, in / 32, 16]`."""
    scales: np.ndarray
    """uint8 exponents `[..., out, in / 32]`."""

    def __getitem__(self, index: Any) -> Mxfp4Tensor:
        return Mxfp4Tensor(self.blocks[index], self.scales[index])

    def dequantize(self) -> np.ndarray:
        """Return `[out, in]` in bfloat16, which holds every product of a number and a scale."""
        numbers = np.stack([self.blocks & 15, self.blocks >> 4], axis=-1)  # (O, I/32, 16, 2)
        factors = np.ldexp(np.float32(1), self.scales.astype(np.int32) - _EXPONENT_BIAS)
        wide = _VALUES[numbers] * factors[:, :, None, None]
        return wide.reshape(len(self.blocks), -1).astype(ml_dtypes.bfloat16)


def _take_matrices(tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
    matrices: dict[str, ReadMatrix] = {}
    for blocks in [info for name, info in tensors.items() if name.endswith(_BLOCKS)]:
        del tensors[blocks.name]
        name = blocks.name.removesuffix(_BLOCKS)
        scales = tensors.pop(name + _SCALES, None)
        tensors[name] = replace(
            blocks, name=name, shape=_shape(blocks, scales), stored_dtype="MXFP4", is_quantized=True
        )
        matrices[name] = partial(_read, name)
    return matrices


def _read(name: str, read: Read) -> Mxfp4Tensor:
    return Mxfp4Tensor(read(name + _BLOCKS), read(name + _SCALES))


def _shape(blocks: TensorInfo, scales: TensorInfo | None) -> tuple[int, ...]:
    """Return `[experts, out, in]`."""
    if len(blocks.shape) == 4 and blocks.shape[3] == _BLOCK // 2 and scales is not None:
        experts, outputs, groups, _ = blocks.shape
        if scales.shape == (experts, outputs, groups):
            return (experts, outputs, groups * _BLOCK)
    raise CheckpointError(
        f"{blocks.file}: tensor {shown(blocks.name)}: expected blocks of {_BLOCK // 2} bytes for each of its scales, "
        f"found shapes {blocks.shape} and {None if scales is None else scales.shape}"
    )


def _read_config(found: Mapping[str, Any]) -> CheckpointForm | None:
    return CheckpointForm(_take_matrices, note=_NOTE) if found.get("quant_method") == "mxfp4" else None


CHECKPOINTS = CheckpointForms(("mxfp4",), _read_config)
