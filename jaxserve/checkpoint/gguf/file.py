"""A GGUF file (version 2 or 3, little endian), or a model split into several: its metadata and tensors, every number in the headers
checked.

Nothing in a header is trusted: counts, lengths, offsets and sizes are compared, as Python integers, with
the bytes that are really there before anything of their size is allocated. Tensors are read one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.files import map_array
from jaxserve.checkpoint.gguf.header import GGUFTensor
from jaxserve.checkpoint.gguf.split import read_headers
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.stored_blocks import StoredBlocks

_STORED_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened GGUF file or split model. Holds no descriptor and no mapping between reads."""

    path: Path
    """The file; of a split model the first."""
    metadata: Mapping[str, Any]
    """All keys; arrays are lists."""
    tensors: Mapping[str, GGUFTensor]
    file_bytes: Mapping[Path, int]
    """Size of each file that tensors are in."""

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: F32, F16 and BF16 as stored (a read-only view), quantised types as new float32."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected to be in the file, found none")
        dtype = _STORED_DTYPES.get(tensor.kind.name)
        if dtype is None:
            return self.read_blocks(name).dequantize().reshape(tensor.shape)
        return self._map(tensor, dtype, tensor.shape)

    def read_blocks(self, name: str) -> StoredBlocks:
        """Return a tensor of a quantised type as it is stored: a read-only view, with all dimensions but the last as one."""
        tensor = self.tensors[name]
        kind, num_rows = tensor.kind, math.prod(tensor.shape[:-1])
        stored = self._map(tensor, np.dtype(np.uint8), (num_rows, tensor.num_bytes // num_rows))
        return StoredBlocks(kind.name, stored, kind.block_elements, kind.block_bytes)

    def _map(self, tensor: GGUFTensor, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        return map_array(
            tensor.file, dtype, shape, offset=tensor.offset, expected_file_size=self.file_bytes[tensor.file]
        )


def open_gguf(path: Path) -> GGUFFile:
    """Open and validate a GGUF file, or all files of a split model by its first; raise CheckpointError naming file, key or tensor,
    expected and found value."""
    headers = read_headers(path)
    tensors = {name: tensor for header in headers.values() for name, tensor in header.tensors.items()}
    sizes = {file: header.num_file_bytes for file, header in headers.items()}
    return GGUFFile(path, headers[path].metadata, tensors, sizes)
