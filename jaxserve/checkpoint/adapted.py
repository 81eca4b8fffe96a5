"""A model's checkpoint with LoRA adapters: their matrices are tensors of the modules that they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.checkpoint.peft import Adapter, Addition
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.tensor import Tensor, TensorInfo

DOWN: Final = ".lora_A.weight"
UP: Final = ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class AdaptedCheckpoint(CheckpointView):
    """Each adapter has `rank` rows of a module's matrix A and columns of its matrix B, in the order of adapters.

    Unused rows and columns are zeros.
    """

    adapters: Sequence[Adapter]
    rank: int

    def read(self, name: str) -> Tensor:
        end = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        if end is None:
            return self.inner.read(name)
        matrix = np.zeros(self.tensors[name].shape, np.float32)
        for index, adapter in enumerate(self.adapters):
            addition = adapter.additions.get(name.removesuffix(end))
            if addition is None:
                continue
            ranks = slice(index * self.rank, index * self.rank + addition.rank)
            if end == DOWN:
                matrix[ranks] = adapter.file.read(addition.down)
            else:
                matrix[:, ranks] = adapter.file.read(addition.up)[addition.rows].astype(np.float32) * addition.scale
        return matrix


def with_adapters(checkpoint: Checkpoint, adapters: Sequence[Adapter], rank: int) -> Checkpoint:
    """Add the matrices of `adapters`, each padded to `rank`; raise CheckpointError if their shapes differ."""
    tensors = dict(checkpoint.tensors)
    for adapter in adapters:
        for module, addition in adapter.additions.items():
            for info in _infos(adapter, module, addition, rank * len(adapters)):
                known = tensors.setdefault(info.name, info)
                if known.shape != info.shape:
                    raise CheckpointError(
                        f"adapter {shown(adapter.name)}: {module}: shape {info.shape}, where another has {known.shape}"
                    )
    return AdaptedCheckpoint(checkpoint, tensors, adapters, rank)


def _infos(adapter: Adapter, module: str, addition: Addition, num_ranks: int) -> tuple[TensorInfo, TensorInfo]:
    down, up = adapter.file.tensors[addition.down], adapter.file.tensors[addition.up]
    rows, path = addition.rows.stop - addition.rows.start, adapter.file.path
    return (
        TensorInfo(module + DOWN, (num_ranks, down.shape[1]), down.dtype, down.num_bytes, path),
        TensorInfo(module + UP, (rows, num_ranks), up.dtype, up.num_bytes, path),
    )
