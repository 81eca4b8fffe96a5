"""A GGUF file (version 2 or 3, little endian): its metadata and tensors, every number in the header checked.

Nothing in the header is trusted: counts, lengths, offsets and sizes are compared, as Python integers, with
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
from jaxserve.checkpoint.gguf.header import GGUFTensor, read_header
from jaxserve.errors import CheckpointError, shown

_STORED_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_CHUNK_ELEMENTS = 1 << 18
"""Elements dequantised at a time: temporaries stay in cache, and the peak is the result plus a few MB."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened GGUF file. Holds no descriptor and no mapping between reads."""

    path: Path
    metadata: Mapping[str, Any]
    """All keys; arrays are lists."""
    tensors: Mapping[str, GGUFTensor]
    num_file_bytes: int

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: F32, F16 and BF16 as stored (a read-only view), quantised types as new float32."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected to be in the file, found none")
        dtype = _STORED_DTYPES.get(tensor.kind.name)
        shape = (tensor.num_bytes,) if dtype is None else tensor.shape
        stored = map_array(
            self.path, dtype or np.dtype(np.uint8), shape, offset=tensor.offset, expected_file_size=self.num_file_bytes
        )
        return _dequantise(stored, tensor) if dtype is None else stored


def open_gguf(path: Path) -> GGUFFile:
    """Open and validate a GGUF file; raise CheckpointError naming file, key or tensor, expected and found value."""
    header = read_header(path)
    return GGUFFile(path, header.metadata, header.tensors, header.num_file_bytes)


def _dequantise(stored: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    import gguf  # Takes 0.1 s, which a process that only reads metadata need not spend.

    kind = tensor.kind
    quantisation = gguf.GGMLQuantizationType(kind.code)
    num_elements = math.prod(tensor.shape)
    result = np.empty(num_elements, np.float32)
    num_chunk_blocks = _CHUNK_ELEMENTS // kind.block_elements
    num_blocks = num_elements // kind.block_elements
    with np.errstate(all="ignore"):  # a NaN scale in the weights is no warning
        for start in range(0, num_blocks, num_chunk_blocks):
            stop = min(start + num_chunk_blocks, num_blocks)
            result[start * kind.block_elements : stop * kind.block_elements] = gguf.quants.dequantize(
                stored[start * kind.block_bytes : stop * kind.block_bytes], quantisation
            )
    return result.reshape(tensor.shape)
