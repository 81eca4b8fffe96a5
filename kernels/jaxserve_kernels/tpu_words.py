"""Quantised weights as TPUs store them: words of 32 bits whose lanes are outputs, in the bytes that the checkpoint has.

Arrays are int32 `[words, O]`. The words of `UNIT` inputs lie together, so scales are rows that broadcast along the inputs,
and upcast weights are `[I, O]`, as the MXU takes them. Words of a unit, r a word's number among them:

    codes of GGUF blocks (`block_kinds`; unsigned)
        4 low bits    [32]  bits 4k...      input 32k + r
        5th bit       [8]   bit 4k + j      input 32k + 8j + r
        upper 2 bits  [16]  bits 4k + 2j... input 32k + 16j + r
        8 bits        [64]  byte k          input 64k + r
    scales of GGUF blocks
        one level     d [4], then m [4] if the type has it: half k is the float16 of block 4k + r
        two levels    factors [4]: byte k is factor 4k + r, those of d (8 or 16), then of m (8); [1]: float16 d and m
    numbers of NVFP4  [32]  bits 4k + 16h...: input 64k + 2r + h

A matrix in blocks is one array: the codes of all units, the scales of all units, and unused words up to a multiple of 8: XLA would lay arrays of
experts with another number of words out anew in every step. If devices split the inputs, that is so for each device's share. Numpy only, as `block_kinds`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from jaxserve_kernels.block_kinds import GROUP, BlockKind, take_apart

UNIT: Final = 256
"""Inputs whose words lie together."""
LANES: Final = 128
_SUBLANES: Final = 8
NUMBERS_OF_WORD: Final = 8
"""Numbers of NVFP4."""
_WORD: Final = 32


def code_words(kind: BlockKind) -> int:
    """Return the words of an output's codes of a unit."""
    return UNIT * kind.bits // _WORD


def scale_words(kind: BlockKind) -> int:
    """Return the words of an output's scales of a unit."""
    return 5 if kind.num_inputs == UNIT else 4 * (1 + kind.has_minimum)


def num_words(kind: BlockKind, num_inputs: int, num_shares: int = 1) -> int:
    """Return the words of an output, of all shares of the inputs together."""
    own = num_inputs // num_shares // UNIT * (code_words(kind) + scale_words(kind))
    return num_shares * (own + -own % _SUBLANES)


def pack_blocks(kind: BlockKind, stored: np.ndarray, num_shares: int = 1) -> np.ndarray:
    """Return int32 `[words, rows]` of a file's blocks, uint8 `[rows, bytes of a row]`.

    num_shares: devices that split the inputs.
    """
    num_rows = len(stored)
    blocks = take_apart(kind, stored.reshape(num_rows, -1, kind.stored_bytes))
    codes = _pack_codes(kind, blocks.codes.reshape(num_rows, -1, UNIT))
    if kind.num_inputs == GROUP:
        scales = [_joined(_bits16(each).reshape(num_rows, -1, 2, 4)) for each in blocks.scales]
    else:
        factors = np.concatenate(blocks.factors, axis=-1)
        levels = np.stack([_bits16(each) for each in blocks.scales], axis=-1)
        scales = [_joined(factors.reshape(num_rows, -1, 4, 4)), _joined(levels[..., None])]
    parts = codes, np.concatenate(scales, axis=-1)
    shares = [each.reshape(num_rows, num_shares, -1) for each in parts]  # (rows, shares, words)
    words = np.concatenate(shares, axis=-1)
    words = np.pad(words, ((0, 0), (0, 0), (0, -words.shape[2] % _SUBLANES))).reshape(num_rows, -1)
    return np.ascontiguousarray(words.T).view(np.int32)


def set_word_scales(kind: BlockKind, words: np.ndarray, floats: np.ndarray, num_shares: int = 1) -> None:
    """Give all weights in int32 `[words, rows]` the same scales, float16 d and perhaps m, with factors of 1."""
    num_rows, num_scales = words.shape[1], scale_words(kind)
    shares = words.view(np.uint32).reshape(num_shares, -1, num_rows)
    num_units = shares.shape[1] // (code_words(kind) + num_scales)
    scales = shares[:, num_units * code_words(kind) :][:, : num_units * num_scales]
    scales = scales.reshape(num_shares, num_units, num_scales, num_rows)  # a view
    halves = floats.view(np.uint16).astype(np.uint32)
    if kind.num_inputs == GROUP:
        scales[:] = np.repeat(halves * np.uint32(0x10001), 4)[:, None]
    else:
        scales[:, :, :4] = 0x01010101
        scales[:, :, 4:] = np.bitwise_or.reduce(halves << np.arange(0, 16 * len(halves), 16, dtype=np.uint32))


def pack_numbers(values: np.ndarray) -> np.ndarray:
    """Return int32 `[words, rows]` of bytes with two numbers of 4 bits, the first in the low half, uint8 `[rows, I / 2]`."""
    pairs = values.reshape(len(values), -1, 4, _WORD)  # (rows, units, k, r)
    words = _joined(pairs & 15, 4) | _joined(pairs >> 4, 4) << np.uint32(16)
    return np.ascontiguousarray(words.reshape(len(values), -1).T).view(np.int32)


def _pack_codes(kind: BlockKind, codes: np.ndarray) -> np.ndarray:
    """Return uint32 `[rows, units, words]` of uint8 `[rows, units, UNIT]`."""
    shape = codes.shape[:2]
    if kind.bits == 8:
        return _joined(codes.reshape(*shape, 4, -1))
    parts, upper = [_joined(codes.reshape(*shape, 8, -1) & 15)], codes >> 4
    if kind.bits > 4:
        parts.append(_joined(upper.reshape(*shape, _WORD // (kind.bits - 4), -1)))
    return np.concatenate(parts, axis=-1)


def _joined(fields: np.ndarray, bits: int | None = None) -> np.ndarray:
    """Return uint32 `[rows, units, words]` of `[rows, units, fields of a word, words]`; bits: of a field, None: those that fill a word."""
    count = fields.shape[2]
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(_WORD // count if bits is None else bits)
    joined: np.ndarray = np.bitwise_or.reduce(fields.astype(np.uint32) << shifts[:, None], axis=2)
    return joined


def _bits16(floats: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(floats).view(np.uint16)
