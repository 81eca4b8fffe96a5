"""The block types of GGUF files that kernels multiply with, and the layout in which they lie on a device.

A file stores each row of a matrix as blocks of 32 or 256 weights, every weight as an unsigned code u of 4 to 8 bits with
w = d * (u - zero), or w = d * u - m. On a device the blocks of 16 rows ("outputs") are one tile, in about as many bytes:

    codes of 32 inputs, for every 32 inputs of a block
        low nibbles  [4, 16, 4]  byte (v, output, b): input 8v + b in the low half, 8v + 4 + b in the high half
        5th bits     [16, 4]     bit k of byte (output, b): input 4k + b
        upper 2 bits [2, 16, 4]  bits 2k of byte (v, output, b): input 16v + 4k + b
        8 bits       [8, 16, 4]  byte (k, output, b): input 4k + b
    scales of the block
        one level    d [16] float16, m [16] float16 if the type has it
        Q4_K, Q5_K   6-bit factors of d [8, 16], of m [8, 16]; d [16], m [16] float16
        Q6_K         int8 factors of d for every 16 inputs [16, 16]; d [16] float16

So a vector of 4-byte lanes holds 4 neighbouring inputs of each output, which is what dot products of bytes take. TPUs have
another layout, `tpu_words`. Numpy only: processes without jax read these types, too. Source of the types: ggml-quants.h and its scalar code in ggml (MIT).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

TILE: Final = 16
"""Outputs of a tile."""
GROUP: Final = 32
"""Inputs whose codes lie together, and whose activations share a scale where those are rounded."""
_FLOAT16: Final = 2


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One block type."""

    name: str
    """ggml's name."""
    index: int
    """Number by which the native kernels know it."""
    bits: int
    zero: int
    """Code of the weight 0; 0 where a minimum is subtracted instead."""
    num_inputs: int
    """Weights of a block: 32, or 256 with scales of two levels."""
    stored_bytes: int
    """Bytes of a block in a file."""

    @property
    def has_minimum(self) -> bool:
        """Return True if w = d * u - m."""
        return self.zero == 0

    @property
    def num_groups(self) -> int:
        return self.num_inputs // GROUP

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a tile's outputs and `GROUP` inputs."""
        return TILE * GROUP * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        """Bytes of a block of a tile."""
        factors = 0 if self.num_inputs == GROUP else TILE * 16
        return self.num_groups * self.code_bytes + factors + TILE * _FLOAT16 * (1 + self.has_minimum)


BLOCK_KINDS: Final[Mapping[str, BlockKind]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockKind("Q4_0", 0, 4, 8, 32, 18),
            BlockKind("Q4_1", 1, 4, 0, 32, 20),
            BlockKind("Q5_0", 2, 5, 16, 32, 22),
            BlockKind("Q5_1", 3, 5, 0, 32, 24),
            BlockKind("Q8_0", 4, 8, 128, 32, 34),
            BlockKind("Q4_K", 5, 4, 0, 256, 144),
            BlockKind("Q5_K", 6, 5, 0, 256, 176),
            BlockKind("Q6_K", 7, 6, 32, 256, 210),
        )
    }
)
"""By ggml's name."""


class Blocks(NamedTuple):
    """Blocks of a file, taken apart: R rows, B blocks of each."""

    codes: np.ndarray  # uint8 (R, B, inputs)
    factors: tuple[np.ndarray, ...]  # uint8 (R, B, 8 or 16), of d and perhaps of m
    scales: tuple[np.ndarray, ...]  # float16 (R, B), d and perhaps m


def pack_tiles(kind: BlockKind, stored: np.ndarray) -> np.ndarray:
    """Return uint8 `[rows / 16, blocks, tile_bytes]` of a file's blocks, uint8 `[rows, bytes of a row]`."""
    num_rows, num_tiles = len(stored), len(stored) // TILE
    blocks = take_apart(kind, stored.reshape(num_rows, -1, kind.stored_bytes))
    shape = (num_tiles, blocks.codes.shape[1])
    codes = blocks.codes.reshape(num_tiles, TILE, shape[1], kind.num_groups, 8, 4)
    codes = np.ascontiguousarray(codes.transpose(0, 2, 3, 4, 1, 5))  # (tiles, blocks, groups, step, output, byte)
    parts = [_pack_codes(kind, codes).reshape(*shape, -1)]
    by_output = (each.reshape(num_tiles, TILE, *each.shape[1:]) for each in blocks.factors)
    parts += [each.transpose(0, 2, 3, 1).reshape(*shape, -1) for each in by_output]
    by_tile = (each.reshape(num_tiles, TILE, -1).swapaxes(1, 2) for each in blocks.scales)
    parts += [np.ascontiguousarray(each).view(np.uint8).reshape(*shape, -1) for each in by_tile]
    return np.concatenate(parts, axis=-1)


def _pack_codes(kind: BlockKind, codes: np.ndarray) -> np.ndarray:
    """Pack uint8 (tiles, blocks, groups, 8, 16, 4) into (tiles, blocks, groups, vectors, 16, 4)."""
    if kind.bits == 8:
        return codes
    parts = [codes[:, :, :, 0::2] & 15 | codes[:, :, :, 1::2] << 4]
    upper = codes >> 4
    if kind.bits == 5:
        parts.append(_gathered_bits(upper, 1))
    if kind.bits == 6:
        parts += [_gathered_bits(upper[:, :, :, :4], 2), _gathered_bits(upper[:, :, :, 4:], 2)]
    return np.concatenate(parts, axis=3)


def _gathered_bits(codes: np.ndarray, width: int) -> np.ndarray:
    """Join the codes of all steps, of `width` bits each, in one byte."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None, None]
    return np.bitwise_or.reduce(codes << shifts, axis=3, keepdims=True)


def take_apart(kind: BlockKind, blocks: np.ndarray) -> Blocks:
    """Take apart uint8 (R, B, stored_bytes)."""
    if kind.name == "Q6_K":
        return _take_q6_k(blocks)
    if kind.num_inputs == GROUP:
        return _take_one_level(kind, blocks)
    scales = (_float16(blocks[..., 0:2]), _float16(blocks[..., 2:4]))
    packed = blocks[..., 4:16]
    low, high, mixed = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    of_d = np.concatenate([low & 63, mixed & 15 | (low >> 6) << 4], axis=-1)
    of_m = np.concatenate([high & 63, mixed >> 4 | (high >> 6) << 4], axis=-1)
    nibbles = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 1, GROUP)
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-2).reshape(*blocks.shape[:2], 8, GROUP)
    if kind.bits == 5:
        fifth = blocks[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes = codes | fifth << 4
    return Blocks(codes.reshape(*blocks.shape[:2], -1), (of_d, of_m), scales)


def _take_one_level(kind: BlockKind, blocks: np.ndarray) -> Blocks:
    scales = tuple(_float16(blocks[..., at : at + 2]) for at in range(0, 2 * (1 + kind.has_minimum), 2))
    if kind.bits == 8:
        return Blocks(blocks[..., 2:] ^ 128, (), scales)  # two's complement, 128 too large
    nibbles = blocks[..., -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    if kind.bits == 5:
        codes = codes | np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little") << 4
    return Blocks(codes, (), scales)


def _take_q6_k(blocks: np.ndarray) -> Blocks:
    shape = blocks.shape[:2]
    low = blocks[..., 0:128].reshape(*shape, 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*shape, 2, 4, GROUP)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, GROUP) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (nibbles | high << 4).reshape(*shape, -1)
    return Blocks(codes, (blocks[..., 192:208],), (_float16(blocks[..., 208:210]),))


def _float16(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0]
