"""Experts that a checkpoint stores all in one tensor, as gpt-oss does, under the names of each.

`gate_up_proj` holds gates and ups in turn. Matrices are inputs by outputs in 16 bits and more, or MXFP4 (OCP Microscaling
Formats, version 1.0): `_blocks` with two numbers in a byte, the first in its low half, and `_scales` with the exponent
of every 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from jaxserve.checkpoint.mapped_file import shown
from jaxserve.checkpoint.protocol import Checkpoint, TensorInfo
from jaxserve.checkpoint.view import CheckpointView
from jaxserve.config import WeightFormat
from jaxserve.errors import CheckpointError

_WHOLE: Final = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_PARTS: Final[Mapping[str, tuple[tuple[str, slice], ...]]] = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}
"""What lies in a tensor, and in which of its outputs."""
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What the four bits mean (e2m1)."""
_EXPONENT_BIAS: Final = 127
_BLOCK: Final = 32


class StoredMxfp4(msgspec.Struct, frozen=True, tag=True):
    """Of a checkpoint whose experts are MXFP4."""

    plain_matrices: tuple[str, ...] = ()

    @property
    def format(self) -> WeightFormat:
        """None of ours keeps what is stored."""
        return "none"

    @property
    def note(self) -> str:
        """What a user should know of serving it as it is."""
        return (
            "MXFP4 experts are widened as they are loaded; --quantization int4-weight-only keeps 4 bits, rounded again"
        )

    @property
    def group_size(self) -> None:
        """It is widened."""
        return None

    @property
    def has_zeros(self) -> bool:
        return False


class _Place(NamedTuple):
    """Where a part of an expert lies."""

    stored: str
    expert: int
    outputs: slice


@dataclass(frozen=True, slots=True)
class StackedCheckpoint(CheckpointView):
    """A checkpoint some of whose tensors are parts of others."""

    places: Mapping[str, _Place]

    def read(self, name: str) -> np.ndarray:
        place = self.places.get(name)
        if place is None:
            return self.inner.read(name)
        stored: np.ndarray = self.inner.read(place.stored)[place.expert]
        if place.stored.endswith(_BIAS):
            return stored[place.outputs]
        if not place.stored.endswith(_BLOCKS):
            return stored[:, place.outputs].T
        scales = self.inner.read(place.stored.removesuffix(_BLOCKS) + _SCALES)[place.expert]
        return widened_mxfp4(stored[place.outputs], scales[place.outputs])


def widened_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[O, I] in bfloat16, which holds every product of the two, from [O, I / 32, 16] bytes and [O, I / 32] exponents."""
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1)  # (O, I/32, 16, 2)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - _EXPONENT_BIAS)
    wide = _VALUES[numbers] * factors[:, :, None, None]
    return wide.reshape(len(blocks), -1).astype(ml_dtypes.bfloat16)


def with_each_expert(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a matrix and a bias for each expert.

    Raises CheckpointError for blocks and scales that do not fit.
    """
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, _Place] = {}
    for name, info in checkpoint.tensors.items():
        if not any(part in name for part in _WHOLE):
            tensors[name] = info
        elif not name.endswith(_SCALES):
            for own, part, place in _parts(checkpoint, name, info):
                tensors[own], places[own] = part, place
    return StackedCheckpoint(checkpoint, tensors, places)


def _parts(checkpoint: Checkpoint, name: str, info: TensorInfo) -> list[tuple[str, TensorInfo, _Place]]:
    """What each expert has in a tensor: its name, its shape, and where it lies."""
    above, _, last = name.rpartition(".")
    whole = last.removesuffix(_BIAS).removesuffix(_BLOCKS)
    count, *own_shape = info.shape
    if last.endswith(_BLOCKS):
        own_shape = _widened_shape(checkpoint, name, info)
        info = replace(info, stored_dtype="MXFP4")
    elif not last.endswith(_BIAS):
        own_shape = own_shape[::-1]
    kind = "bias" if last.endswith(_BIAS) else "weight"
    found = []
    for part, outputs in _PARTS.get(whole, ()):
        rows = len(range(own_shape[0])[outputs])
        size = info.num_stored_bytes * rows // (own_shape[0] * count)
        for expert in range(count):
            own = f"{above}.{expert}.{part}.{kind}"
            own_info = replace(info, name=own, shape=(rows, *own_shape[1:]), num_stored_bytes=size)
            found.append((own, own_info, _Place(name, expert, outputs)))
    return found


def _widened_shape(checkpoint: Checkpoint, name: str, info: TensorInfo) -> list[int]:
    scales = checkpoint.tensors.get(name.removesuffix(_BLOCKS) + _SCALES)
    is_whole = len(info.shape) == 4 and info.shape[3] == _BLOCK // 2
    if not is_whole or scales is None or scales.shape != info.shape[:3]:
        raise CheckpointError(
            f"{info.file}: tensor {shown(name)}: expected blocks of {_BLOCK // 2} bytes for each of its scales, found "
            f"shapes {info.shape} and {None if scales is None else scales.shape}"
        )
    return [info.shape[1], info.shape[2] * _BLOCK]
