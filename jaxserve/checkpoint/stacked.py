"""Split experts that a checkpoint stacks in one tensor (gpt-oss) into one tensor each.

`gate_up_proj` interleaves gate and up. Matrices are inputs by outputs, or outputs by inputs if they are quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.quant.tensor import Tensor, TensorInfo

_WHOLE: Final = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")
_PARTS: Final[Mapping[str, tuple[tuple[str, slice], ...]]] = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}
"""Parts of a stacked tensor, and the outputs of each."""
_BIAS: Final = "_bias"


class _Place(NamedTuple):
    """Location of a part of an expert."""

    stored: str
    expert: int
    outputs: slice
    is_by_outputs: bool
    """True if outputs are the first dimension of an expert's matrix; False: inputs are."""


@dataclass(frozen=True, slots=True)
class StackedCheckpoint(CheckpointView):
    """A checkpoint with tensors that are parts of stored ones."""

    places: Mapping[str, _Place]

    def read(self, name: str) -> Tensor:
        place = self.places.get(name)
        if place is None:
            return self.inner.read(name)
        stored = self.inner.read(place.stored)
        if isinstance(stored, np.ndarray) and not place.is_by_outputs:
            return stored[place.expert, :, place.outputs].T
        return stored[place.expert][place.outputs]


def with_each_expert(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a matrix and a bias for each expert."""
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, _Place] = {}
    for name, info in checkpoint.tensors.items():
        if not any(part in name for part in _WHOLE):
            tensors[name] = info
        else:
            for own, part, place in _parts(name, info):
                tensors[own], places[own] = part, place
    return StackedCheckpoint(checkpoint, tensors, places)


def _parts(name: str, info: TensorInfo) -> list[tuple[str, TensorInfo, _Place]]:
    """Return the name, shape and location of every expert's part of a tensor."""
    above, _, last = name.rpartition(".")
    is_bias = last.endswith(_BIAS)
    is_by_outputs = is_bias or info.is_quantized
    count, *own_shape = info.shape if is_by_outputs else (info.shape[0], *info.shape[:0:-1])
    found = []
    for part, outputs in _PARTS.get(last.removesuffix(_BIAS), ()):
        rows = len(range(own_shape[0])[outputs])
        size = info.num_stored_bytes * rows // (own_shape[0] * count)
        for expert in range(count):
            own = f"{above}.{expert}.{part}.{'bias' if is_bias else 'weight'}"
            own_info = replace(info, name=own, shape=(rows, *own_shape[1:]), num_stored_bytes=size)
            found.append((own, own_info, _Place(name, expert, outputs, is_by_outputs)))
    return found
