"""Weights in the blocks of a GGUF file, each matrix in the type that the file has for it."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Final

import numpy as np
from jaxserve_kernels.block_kinds import BLOCK_KINDS, GROUP, TILE, BlockKind, pack_tiles

from jaxserve.errors import CheckpointError
from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.format import Format, Host
from jaxserve.quant.formats import none
from jaxserve.quant.stored_blocks import StoredBlocks
from jaxserve.quant.tensor import Tensor

_HOPPER: Final = (9, 0)
"""Compute capability of the GPUs that have a kernel for blocks."""
_PACKED_WEIGHTS: Final = 1 << 24
"""Weights that are brought into the layout of a device at a time: each takes some bytes meanwhile."""


class BlockFormat(Format):
    """Values uint8 `[out / 16, blocks, bytes]` in the layout of `block_kinds`; on the host the file's `[out, bytes]`.

    `FORMAT` of a module declares matrices and has no type; an array's format has that of its matrix. Plain are matrices
    whose type has no kernel, those of experts, and those whose outputs do not divide into tiles on each device, or whose
    inputs not into blocks.
    """

    bits: ClassVar[int] = 4
    keeps_blocks: ClassVar[bool] = True

    def __init__(self, kind: BlockKind | None = None) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return self.name if self._kind is None else f"{self.name} {self._kind.name}"

    @property
    def kind(self) -> BlockKind:
        """The block type of an array's weights."""
        assert self._kind is not None, "a matrix has a type"
        return self._kind

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        return np.dtype(np.uint8)

    def has_native_matmul(self, weights: np.dtype) -> bool:
        from jaxserve_kernels.block_matmul.cpu import is_built

        return is_built() and none.FORMAT.has_native_matmul(weights)

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        kind = BLOCK_KINDS.get(spec.stored_kind or "")
        if kind is None or spec.num_experts is not None or not _fits(kind, spec):
            return none.FORMAT.declare(spec)
        shape = (spec.out_dim // TILE, spec.in_dim // kind.num_inputs, kind.tile_bytes)
        return QuantArray(_of_kind(type(self), kind.name), spec.array(shape, (*spec.axes, None), np.uint8))

    def convert(self, tensor: Tensor, declared: QuantArray[ArraySpec]) -> Host:
        if isinstance(tensor, StoredBlocks) and tensor.kind == self.kind.name:
            return QuantArray(self, tensor.blocks)
        return super().convert(tensor, declared)

    def keep(self, stored: Host, declared: QuantArray[ArraySpec]) -> Host | None:
        return stored if stored.format is self else None

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        """Round to nearest as ggml does. Raises CheckpointError for types with scales of two levels."""
        import gguf

        if self.kind.num_inputs != GROUP:
            raise CheckpointError(
                f"weights that are not in blocks cannot replace {self.kind.name} blocks; give a GGUF file of the same "
                f"types, or serve with another --quantization than {self.name}"
            )
        kind = gguf.GGMLQuantizationType[self.kind.name]
        return QuantArray(self, gguf.quants.quantize(weights.astype(np.float32, copy=False), kind))

    def dequantize(self, stored: Host) -> np.ndarray:
        kind = self.kind
        return StoredBlocks(kind.name, stored.values, kind.num_inputs, kind.stored_bytes).dequantize()

    def to_device(self, host: Host) -> Host:
        kind, rows = self.kind, host.values
        num_blocks = rows.shape[1] // kind.stored_bytes
        tiles = np.empty((len(rows) // TILE, num_blocks, kind.tile_bytes), np.uint8)
        step = max(1, _PACKED_WEIGHTS // (TILE * num_blocks * kind.num_inputs))
        for start in range(0, len(tiles), step):
            tiles[start : start + step] = pack_tiles(kind, rows[TILE * start : TILE * (start + step)])
        return QuantArray(self, tiles)

    def random(self, noise: np.ndarray, declared: QuantArray[ArraySpec], deviation: float) -> Host:
        """Return random codes under one scale, whose middle is about 0."""
        kind, shape = self.kind, declared.values.shape
        tiles = np.resize(noise.view(np.uint8).reshape(-1, 4)[:, 0], shape)
        is_two_level = kind.num_inputs != GROUP
        num_floats = 2 * TILE * (1 + kind.has_minimum)
        if is_two_level:
            tiles[..., kind.num_groups * kind.code_bytes : -num_floats] = 1
        d = deviation * 12**0.5 / 2**kind.bits
        m = d * 2 ** (kind.bits - 1) * (1 if is_two_level else -1)  # subtracted with two levels, else added
        floats = np.repeat(np.array([d, m][: 1 + kind.has_minimum], np.float16), TILE)
        tiles[..., -num_floats:] = floats.view(np.uint8)
        return QuantArray(self, tiles)

    def matmul(self, x: Any, weight: QuantArray[Any], num_rows: Any, backend: Any, dtype: Any = "float32") -> Any:
        from jaxserve_kernels.block_matmul import block_matmul

        dynamic = self.quantizes_activations
        product = block_matmul(x, weight.values, num_rows, kind=self.kind, dynamic=dynamic, backend=backend)
        return product.astype(dtype)

    def lookup(self, table: QuantArray[Any], rows: Any, dtype: Any) -> Any:
        from jaxserve_kernels.block_matmul import dequantize_rows

        return dequantize_rows(self.kind, table.values, rows).astype(dtype)

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        if platform == "cpu":
            return ()
        if capability == _HOPPER:
            return (
                "steps of up to 128 tokens read blocks as they are stored; longer ones (prompts) dequantise them first",
            )
        return (
            "every step dequantises the blocks of the GGUF file here, which saves memory and costs time; --quantization "
            "int8-weight-only or int4-weight-only are read as they are stored",
        )


@cache
def _of_kind(cls: type[BlockFormat], name: str) -> BlockFormat:
    return cls(BLOCK_KINDS[name])


def _fits(kind: BlockKind, spec: MatrixSpec) -> bool:
    return (
        spec.out_dim % (TILE * spec.num_output_shards) == 0
        and spec.in_dim % (kind.num_inputs * spec.num_input_shards) == 0
    )
