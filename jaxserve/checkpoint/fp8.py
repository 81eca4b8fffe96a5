"""Checkpoints whose matrices are stored as 8-bit floats (e4m3): what config.json says of them, and their scales.

A scale multiplies what is stored (`weight_scale`, and `weight_scale_inv` too) and belongs to a whole matrix, to one
output, or to a block of outputs and inputs. Which matrices are stored like that is told by the files, not by the lists
and patterns of `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from jaxserve.checkpoint.compressed import only_scheme
from jaxserve.checkpoint.mapped_file import shown
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.refusal import INSTEAD, refusal
from jaxserve.checkpoint.view import CheckpointView
from jaxserve.config import WeightFormat
from jaxserve.errors import CheckpointError

FP8: Final = "F8_E4M3"
ROW_SCALES: Final = "_scale"
"""Behind the name of a matrix: the name of its scales, one for each output."""
_SCALES: Final = ("_scale", "_scale_inv")
_UNUSED: Final = frozenset({"input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale"})
"""Scales of activations and KV cache, fixed in advance: activations are scaled token by token, and the cache is not."""
_DEFAULT_BLOCK: Final = (128, 128)


class StoredFp8(msgspec.Struct, frozen=True, tag=True):
    """How a checkpoint in fp8 wants to be computed."""

    rounds_activations: bool
    """Whether activations are fp8 in products as well."""
    has_row_scales: bool
    """Whether one scale for each output is enough to keep the weights as they are."""
    block: tuple[int, int] = _DEFAULT_BLOCK
    """Outputs and inputs of a block, where scales belong to blocks."""
    plain_matrices: tuple[str, ...] = ("lm_head", "model.embed_tokens")
    """Modules that are stored whole."""

    @property
    def format(self) -> WeightFormat:
        """That keeps what is stored; none where it is widened as it is loaded."""
        if not self.has_row_scales:
            return "none"
        return "fp8" if self.rounds_activations else "fp8-weight-only"

    @property
    def note(self) -> str | None:
        """What a user should know of serving it as it is."""
        if self.has_row_scales:
            return None
        return (
            "fp8 weights with a scale for each block are widened as they are loaded; --quantization fp8 keeps 8 bits, "
            "rounded again to one scale for each output"
        )

    @property
    def group_size(self) -> None:
        """Scales belong to outputs or blocks."""
        return None

    @property
    def has_zeros(self) -> bool:
        return False


def read_fp8(found: Mapping[str, Any]) -> StoredFp8:
    """`quant_method` fp8. Raises CheckpointError for what is not read."""
    scheme = found.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise refusal(".activation_scheme", scheme, "dynamic and static")
    block = found.get("weight_block_size")
    return StoredFp8(True, block is None, _DEFAULT_BLOCK if block is None else _block("weight_block_size", block))


def read_compressed_fp8(found: Mapping[str, Any]) -> StoredFp8:
    """compressed-tensors: `config_groups`, all of them alike. Raises CheckpointError for what is not read."""
    return only_scheme(found, _of_group)


def _of_group(where: str, group: Mapping[str, Any]) -> StoredFp8:
    weights, activations = group.get("weights", {}), group.get("input_activations")
    if not _are_eight_bit_floats(weights):
        raise refusal(
            f"{where}.weights", weights, f"8-bit floats, 4-bit integers with `format` pack-quantized, {INSTEAD}"
        )
    if activations is not None and not _are_eight_bit_floats(activations):
        raise refusal(f"{where}.input_activations", activations, "8-bit floats or none")
    strategy = weights.get("strategy", "tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise refusal(f"{where}.weights.strategy", strategy, "tensor, channel and block")
    block = weights.get("block_structure") if strategy == "block" else None
    size = _DEFAULT_BLOCK if block is None else _block("config_groups block_structure", block)
    return StoredFp8(activations is not None, strategy != "block", size)


def _are_eight_bit_floats(table: Any) -> bool:
    match table:
        case {"num_bits": 8, "type": "float"}:
            return table.get("symmetric", True) is True
    return False


def _block(key: str, value: object) -> tuple[int, int]:
    match value:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise refusal(f".{key}", value, "two positive numbers")


@dataclass(frozen=True, slots=True)
class Fp8Checkpoint(CheckpointView):
    """A checkpoint with matrices in fp8.

    One with a scale for the whole or for each output is read as it is stored, and its scales, one for each output, as a
    tensor of their own (`ROW_SCALES`). One with scales of blocks is widened.
    """

    row_scales: Mapping[str, str]
    """What each tensor of row scales is called in the files."""
    block_scales: Mapping[str, str]
    """By matrix."""
    block: tuple[int, int]

    def read(self, name: str) -> np.ndarray:
        if name in self.row_scales:
            scales = self.inner.read(self.row_scales[name]).astype(np.float32).reshape(-1)
            return np.broadcast_to(scales, self.tensors[name].shape)
        values = self.inner.read(name)
        if name not in self.block_scales:
            return values
        (height, width), wide = self.block, values.astype(np.float32)
        for index, scales in enumerate(self.inner.read(self.block_scales[name]).astype(np.float32)):
            wide[index * height : (index + 1) * height] *= np.repeat(scales, width)[: wide.shape[1]]
        return wide


def with_scales(checkpoint: Checkpoint, stored: StoredFp8) -> Checkpoint:
    """The same, with what is stored as fp8 and its scales brought together.

    Raises CheckpointError in one line where a scale is missing or has another shape.
    """
    matrices = [info for info in checkpoint.tensors.values() if info.stored_dtype == FP8]
    tensors = {name: info for name, info in checkpoint.tensors.items() if name.rpartition(".")[2] not in _UNUSED}
    row_scales, block_scales = {}, {}
    for matrix in matrices:
        scale = next((tensors.pop(name) for end in _SCALES if (name := matrix.name + end) in tensors), None)
        if scale is None:
            raise CheckpointError(f"{matrix.file}: tensor {shown(matrix.name)}: expected its weight_scale, found none")
        rows = matrix.shape[:1]
        if scale.shape in ((), (1,), rows, (*rows, 1)):
            name = matrix.name + ROW_SCALES
            tensors[name] = replace(scale, name=name, shape=rows)
            row_scales[name] = scale.name
        elif scale.shape == tuple(-(-size // of) for size, of in zip(matrix.shape, stored.block, strict=False)):
            block_scales[matrix.name] = scale.name
        else:
            raise CheckpointError(
                f"{scale.file}: tensor {shown(scale.name)}: expected one scale, one for each output of {matrix.shape} "
                f"or for each block of {stored.block}, found shape {scale.shape}"
            )
    return Fp8Checkpoint(checkpoint, tensors, row_scales, block_scales, stored.block)
