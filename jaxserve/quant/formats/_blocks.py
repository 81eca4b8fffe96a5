"""Weights in the blocks of a GGUF file, each matrix in the type that the file has for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Final

import numpy as np
from jaxserve_kernels.block_kinds import BLOCK_KINDS, GROUP, TILE, BlockKind, pack_tiles
from jaxserve_kernels.tpu_words import LANES, UNIT, num_words, pack_blocks, set_word_scales

from jaxserve.errors import CheckpointError
from jaxserve.quant.array import ArraySpec, MatrixSpec, QuantArray
from jaxserve.quant.format import Cutting, Format, Host
from jaxserve.quant.formats import none
from jaxserve.quant.stored_blocks import StoredBlocks
from jaxserve.quant.tensor import Tensor

_HOPPER: Final = (9, 0)
"""Compute capability of the GPUs that have a kernel for blocks."""
_PACKED_WEIGHTS: Final = 1 << 24
"""Weights that are brought into the layout of a device at a time: each takes some bytes meanwhile."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The type of a matrix in blocks, and how its blocks lie on a device."""

    kind: BlockKind
    num_word_shares: int = 0
    """For words (`tpu_words`): devices that split the inputs; 0: tiles (`block_kinds`)."""

    def declare(self, spec: MatrixSpec) -> ArraySpec:
        """Return the shape, type and axes of the array."""
        if self.num_word_shares:
            count = num_words(self.kind, spec.in_dim, self.num_word_shares)
            return spec.array((count, spec.out_dim), spec.axes[::-1], np.int32)
        shape = (spec.out_dim // TILE, spec.in_dim // self.kind.num_inputs, self.kind.tile_bytes)
        return spec.array(shape, (*spec.axes, None), np.uint8)

    def pack(self, rows: np.ndarray) -> np.ndarray:
        """Return the array of a file's `[out, bytes]`, or of those of all experts."""
        if rows.ndim == 2:
            return self._pack_matrix(rows)
        return np.stack([self._pack_matrix(each) for each in rows])

    def _pack_matrix(self, rows: np.ndarray) -> np.ndarray:
        num_blocks = rows.shape[1] // self.kind.stored_bytes
        num_inputs = num_blocks * self.kind.num_inputs
        step = TILE * max(1, _PACKED_WEIGHTS // (TILE * num_inputs))
        starts = range(0, len(rows), step)
        if self.num_word_shares:
            words = np.empty((num_words(self.kind, num_inputs, self.num_word_shares), len(rows)), np.int32)
            for start in starts:
                words[:, start : start + step] = pack_blocks(
                    self.kind, rows[start : start + step], self.num_word_shares
                )
            return words
        tiles = np.empty((len(rows) // TILE, num_blocks, self.kind.tile_bytes), np.uint8)
        for start in starts:
            tiles[start // TILE : (start + step) // TILE] = pack_tiles(self.kind, rows[start : start + step])
        return tiles

    def set_scales(self, values: np.ndarray, floats: np.ndarray) -> None:
        """Give all weights the same scales, d and perhaps m, with factors of 1."""
        if self.num_word_shares:
            for words in values.reshape(-1, *values.shape[-2:]):  # views
                set_word_scales(self.kind, words, floats, self.num_word_shares)
            return
        num_floats = 2 * TILE * len(floats)
        if self.kind.num_inputs != GROUP:
            values[..., self.kind.num_groups * self.kind.code_bytes : -num_floats] = 1
        values[..., -num_floats:] = np.repeat(floats, TILE).view(np.uint8)


class BlockFormat(Format):
    """Values uint8 `[out / 16, blocks, bytes]` in the layout of `block_kinds`, on TPUs int32 `[words, out]` in that of `tpu_words`; on
    the host the file's `[out, bytes]`. Those of experts come first.

    `FORMAT` of a module declares matrices and has no type; an array's format has that of its matrix. Plain are matrices
    whose type has no kernel, and those whose outputs do not divide into tiles on each device, or whose
    inputs not into blocks. TPUs have matrices in tiles, too, of which no whole words or lanes are on each device: XLA dequantises these.
    """

    bits: ClassVar[int] = 4
    keeps_blocks: ClassVar[bool] = True

    def __init__(self, layout: _Layout | None = None) -> None:
        self._own_layout = layout
        self.cutting = None if layout is None else _cutting(type(self), layout)

    def __repr__(self) -> str:
        return self.name if self._own_layout is None else f"{self.name} {self._layout.kind.name}"

    @property
    def _layout(self) -> _Layout:
        assert self._own_layout is not None, "a matrix has a type"
        return self._own_layout

    def values_dtype(self, weights: np.dtype, platform: str) -> np.dtype:
        return np.dtype(np.uint8)

    def has_native_matmul(self, weights: np.dtype) -> bool:
        from jaxserve_kernels.block_matmul.cpu import is_built

        return is_built() and none.FORMAT.has_native_matmul(weights)

    def declare(self, spec: MatrixSpec) -> QuantArray[ArraySpec]:
        kind = BLOCK_KINDS.get(spec.stored_kind or "")
        if kind is None or not _fits(kind, spec):
            return none.FORMAT.declare(spec)
        layout = _Layout(kind, spec.num_input_shards if spec.has_words else 0)
        return QuantArray(_with_layout(type(self), layout), layout.declare(spec))

    def convert(self, tensor: Tensor, declared: QuantArray[ArraySpec]) -> Host:
        if isinstance(tensor, StoredBlocks) and tensor.kind == self._layout.kind.name:
            return QuantArray(self, tensor.blocks)
        return super().convert(tensor, declared)

    def quantize(self, weights: np.ndarray, declared: QuantArray[ArraySpec]) -> Host:
        """Round to nearest as ggml does. Raises CheckpointError for types with scales of two levels."""
        import gguf

        if self._layout.kind.num_inputs != GROUP:
            raise CheckpointError(
                f"weights that are not in blocks cannot replace {self._layout.kind.name} blocks; give a GGUF file of the same "
                f"types, or serve with another --quantization than {self.name}"
            )
        kind = gguf.GGMLQuantizationType[self._layout.kind.name]
        return QuantArray(self, gguf.quants.quantize(weights.astype(np.float32, copy=False), kind))

    def dequantize(self, stored: Host) -> np.ndarray:
        kind = self._layout.kind
        return StoredBlocks(kind.name, stored.values, kind.num_inputs, kind.stored_bytes).dequantize()

    def to_device(self, host: Host) -> Host:
        return QuantArray(self, self._layout.pack(host.values))

    def random(self, noise: np.ndarray, declared: QuantArray[ArraySpec], deviation: float) -> Host:
        """Return random codes under one scale, whose middle is about 0."""
        kind, spec = self._layout.kind, declared.values
        random_bytes = noise.view(np.uint8).reshape(-1, 4)[:, 0]
        values = np.resize(random_bytes, (*spec.shape[:-1], spec.shape[-1] * spec.dtype.itemsize)).view(spec.dtype)
        d = deviation * 12**0.5 / 2**kind.bits
        # subtracted with two levels, else added
        m = d * 2 ** (kind.bits - 1) * (1 if kind.num_inputs != GROUP else -1)
        self._layout.set_scales(values, np.array([d, m][: 1 + kind.has_minimum], np.float16))
        return QuantArray(self, values)

    def matmuls(
        self, x: Any, weights: Sequence[QuantArray[Any]], num_rows: Any, backend: Any, dtype: Any = "float32"
    ) -> list[Any]:
        from jaxserve_kernels.block_matmul import block_matmuls

        values, kind, dynamic = [weight.values for weight in weights], self._layout.kind, self.quantizes_activations
        made = block_matmuls(x, values, num_rows, kind=kind, dynamic=dynamic, backend=backend)
        return [y.astype(dtype) for y in made]

    def grouped_matmul(self, x: Any, weight: QuantArray[Any], group_sizes: Any, backend: Any) -> Any:
        from jaxserve_kernels.block_matmul import grouped_block_matmul

        dynamic, kind = self.quantizes_activations, self._layout.kind
        return grouped_block_matmul(x, weight.values, group_sizes, kind=kind, dynamic=dynamic, backend=backend)

    def lookup(self, table: QuantArray[Any], rows: Any, dtype: Any, backend: Any = "reference") -> Any:
        from jaxserve_kernels.block_matmul import dequantize_rows

        return dequantize_rows(self._layout.kind, table.values, rows, backend).astype(dtype)

    def notes(self, platform: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
        if platform == "cpu":
            return ()
        if platform == "tpu":
            return (
                f"matrices whose inputs on a device are a multiple of {UNIT}, and outputs of {LANES}, are read as they are stored; every step "
                "dequantises others",
            )
        if capability == _HOPPER:
            return (
                "steps of up to 128 tokens read blocks as they are stored; longer ones (prompts) dequantise all but those of experts first",
            )
        return (
            "every step dequantises the blocks of the GGUF file here, which saves memory and costs time; --quantization "
            "int8-weight-only or int4-weight-only are read as they are stored",
        )


@cache
def _with_layout(cls: type[BlockFormat], layout: _Layout) -> BlockFormat:
    return cls(layout)


def _cutting(cls: type[BlockFormat], layout: _Layout) -> Cutting:
    """Return how parts are cut from blocks of the same type; words of a part have their own scales after their codes."""
    is_split = layout.num_word_shares > 1
    of_share = _with_layout(cls, replace(layout, num_word_shares=1)) if is_split else None
    return Cutting(partial(_has_kind, layout.kind.name), int(layout.num_word_shares > 0), of_share)


def _has_kind(name: str, tensor: Tensor) -> bool:
    return isinstance(tensor, StoredBlocks) and tensor.kind == name


def _fits(kind: BlockKind, spec: MatrixSpec) -> bool:
    return (
        spec.out_dim % (TILE * spec.num_output_shards) == 0
        and spec.in_dim % (kind.num_inputs * spec.num_input_shards) == 0
    )
