"""Matrices in the blocks of GGUF files, as the file stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from jaxserve_kernels.block_kinds import BLOCK_KINDS

from jaxserve.quant.tensor import TensorInfo, scaled

_CHUNK_ELEMENTS: Final = 1 << 18
"""Elements dequantised at a time: temporaries stay in cache, and the peak is the result plus a few MB."""
_WEIGHT: Final = ".weight"
StoredKinds = tuple[tuple[str, str], ...]
"""Modules of a checkpoint and the block types of their matrices, by ggml's names."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in blocks of one type."""

    kind: str
    """ggml's name of the type: "Q4_1", ..."""
    blocks: np.ndarray
    """uint8 `[out, bytes of a row]`; of all experts `[E, out, bytes of a row]`."""
    block_inputs: int
    """Weights of a block."""
    block_bytes: int

    def __getitem__(self, index: Any) -> StoredBlocks:
        return replace(self, blocks=self.blocks[index])

    def columns(self, inputs: range, num_inputs: int) -> StoredBlocks | None:
        """See `QuantizedTensor.columns`."""
        blocks = scaled(inputs, num_inputs, num_inputs // self.block_inputs)
        if blocks is None:
            return None
        return replace(self, blocks=self.blocks[:, blocks.start * self.block_bytes : blocks.stop * self.block_bytes])

    def dequantize(self) -> np.ndarray:
        """Return `[out, in]` in float32."""
        import gguf  # Takes 0.1 s, which a process that only reads metadata need not spend.

        num_rows, num_inputs = len(self.blocks), self.blocks.shape[1] // self.block_bytes * self.block_inputs
        wide = np.empty((num_rows, num_inputs), np.float32)
        by_block = wide.reshape(-1, self.block_inputs)
        stored = self.blocks.reshape(-1, self.block_bytes)
        step = _CHUNK_ELEMENTS // self.block_inputs
        with np.errstate(all="ignore"):  # a NaN scale in the weights is no warning
            for start in range(0, len(stored), step):
                chunk = stored[start : start + step].reshape(
                    1, -1
                )  # as one row: the package goes through 16 rows at a time
                floats = gguf.quants.dequantize(chunk, gguf.GGMLQuantizationType[self.kind])
                by_block[start : start + step] = floats.reshape(-1, self.block_inputs)
        return wide


def stored_kinds(tensors: Mapping[str, TensorInfo]) -> StoredKinds:
    """Return the block types of all matrices that are stored in blocks, by the names of their modules."""
    infos = (info for info in tensors.values() if info.is_quantized and info.name.endswith(_WEIGHT))
    return tuple(sorted((info.name.removesuffix(_WEIGHT), info.stored_dtype) for info in infos))


def without_kernel(kinds: StoredKinds) -> str | None:
    """Return a note on the matrices that no kernel multiplies with in their blocks; None if there are none."""
    others = [kind for _, kind in kinds if kind not in BLOCK_KINDS]
    if not others:
        return None
    return (
        f"{len(others)} matrices in {_listed(others)} are served dequantised: blocks are kept of {_listed(BLOCK_KINDS)}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))
