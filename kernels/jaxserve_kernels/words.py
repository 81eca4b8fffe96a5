"""Upcast 8- and 4-bit numbers to bfloat16 and float16 in words of 32 bits, for matmuls on GPUs from compute capability 8.0 on.

Pairs of numbers that are half a word apart are upcast at once, by integer operations and one multiply-add, all exact. No
conversion instruction is needed: GPUs have one for e4m3 from 8.9 on only.

The bits. Those of an integer below 256, read as bfloat16, are the number (subnormal, or just not) that is
2 ** -133 times as large. Those of an integer below 1,024 beside those of 1,024 in float16 are the sum of both. Those of an
e4m3 number, moved by a few places, are the number that is 2 ** -120 times as large in bfloat16 and 2 ** -8 times in float16.
Those of an e2m1 number, its last three moved by six places, are the number that is 2 ** -126 times as large in bfloat16; its
multiply-add has its block's e4m3 scale as well, and the result six digits. Numbers and scales must not be NaN: e4m3's become 480.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

_INTEGER_EXPONENT, _E2M1_EXPONENT = -133, -126
_MOST_EXPONENT = 127
"""Largest exponent of a power of two in bfloat16: integers are upcast as 2 ** -6 of themselves."""
_SCALE_EXPONENT = 117
"""Exponent of what e4m3 scales are multiplied with: the largest scale, 448, stays finite."""
_E2M1_BITS = 0x81C0_81C0
"""Bits of a pair of bfloat16 numbers that e2m1 numbers have."""
_SUM = 1024
"""Number in float16 whose last digit counts 1."""


class _Wide(NamedTuple):
    """A type of 16 bits, and how e4m3 is moved into it."""

    name: str
    """In instructions."""
    shift: int
    mask: int
    exponent: int


_BFLOAT16, _FLOAT16 = _Wide("bf16", 4, 0x87F0, 120), _Wide("f16", 7, 0xBF80, 8)


def factor(narrow: Any, wide: Any) -> float:
    """Return the power of two that a matmul of upcast numbers has to be multiplied with; uint8 holds two e2m1 numbers."""
    if narrow == jnp.uint8:
        return 2.0 ** -(_E2M1_EXPONENT + _SCALE_EXPONENT)
    is_scaled = wide == jnp.bfloat16 and narrow != jnp.float8_e4m3fn
    return 2.0 ** -(_INTEGER_EXPONENT + _MOST_EXPONENT) if is_scaled else 1.0


def pairs(register: Any, narrow: Any, wide: Any) -> Iterator[Any]:
    """Yield the pairs of numbers of a register of whole words, without the `factor`.

    Of each word of bytes: the pair of the even ones, then that of the odd ones. Of each word of int4: pairs of numbers
    that are four places apart, in order. float16 is only made of bytes.
    """
    for word in split(register):
        if narrow == jnp.float8_e4m3fn:
            yield from _e4m3(word, _FLOAT16 if wide == jnp.float16 else _BFLOAT16)
        elif wide == jnp.float16:
            yield from _bytes_in_sums(word)
        elif narrow == jnp.int4:
            yield from _integers(word, places=(0, 4, 8, 12), bits=4)
        else:
            yield from _integers(word, places=(0, 8), bits=8)


def split(register: Any) -> Iterator[Any]:
    """Yield the words of a register."""
    count = mgpu.utils.bitwidth(register.type) // 32
    words = mgpu.utils.bitcast(register, ir.VectorType.get((count,), _word_type()))
    for index in range(count):
        yield vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def _integers(word: Any, places: tuple[int, ...], bits: int) -> Iterator[Any]:
    """Yield the pairs of signed integers whose lower ones begin at these places of a word, as 2 ** -6 of themselves."""
    sign = 1 << (bits - 1)
    return centred_pairs(word, places, bits, zero=sign, flipped=sign)


def centred_pairs(word: Any, places: tuple[int, ...], bits: int, zero: int, flipped: int = 0) -> Iterator[Any]:
    """Yield the pairs of codes whose lower ones begin at these places of a word, less `zero`, as 2 ** -6 of themselves.

    flipped: bits of a code that are stored inverted.
    """
    for place in places:
        low = place % 8
        mask = ((1 << bits) - 1) << low
        moved = arith.shrui(word, _constant(place - low)) if place >= 8 else word
        above_zero = _masked(moved, mask * 0x10001, (flipped << low) * 0x10001)
        offset = 2.0 ** (_INTEGER_EXPONENT + _MOST_EXPONENT) * -zero
        yield _multiplied(above_zero, _BFLOAT16, 2.0 ** (_MOST_EXPONENT - low), offset)


def _bytes_in_sums(word: Any) -> Iterator[Any]:
    """Yield the pairs of signed bytes in float16."""
    for place in (0, 8):
        moved = arith.shrui(word, _constant(place)) if place else word
        above_sum = _masked(moved, 0xFF00FF, 0x64806480)
        yield _multiplied(above_sum, _FLOAT16, 1.0, -float(_SUM + 128))


def _e4m3(word: Any, wide: _Wide) -> Iterator[Any]:
    for selector in (0xA280, 0xB391):  # each byte, with its sign in all bits of the byte above
        yield _multiplied(_e4m3_bits(word, selector, wide), wide, 2.0**wide.exponent, -0.0)


def _e4m3_bits(word: Any, selector: int, wide: _Wide) -> Any:
    """Return the bits of two of a word's e4m3 numbers, as 2 ** -wide.exponent of themselves."""
    signed = _instruction("prmt.b32", word, word, _constant(selector))
    return arith.andi(arith.shli(signed, _constant(wide.shift)), _constant(wide.mask * 0x10001))


def e2m1_pairs(word: Any, scale: Any) -> Iterator[Any]:
    """Yield the pairs of e2m1 numbers half a word apart, times a pair of scales (`scale_pair`), in the order of int4.

    The multiplied word has a number at two places: the lower one gives exponent and digit, the upper one the sign.
    """
    upper = arith.shrui(word, _constant(8))
    for byte in (word, upper):
        for mask, places in ((0x000F_000F, 1 << 6 | 1 << 12), (0x00F0_00F0, 1 << 2 | 1 << 8)):
            twice = arith.muli(arith.andi(byte, _constant(mask)), _constant(places))
            bits = arith.andi(twice, _constant(_E2M1_BITS))
            yield _as_pair(_fused(bits, scale, _constant(_twice(-0.0, _BFLOAT16)), _BFLOAT16), _BFLOAT16)


def scale_pair(register: Any) -> Any:
    """Return a pair of equal bfloat16 numbers: an e4m3 scale times 2 ** _SCALE_EXPONENT. No one power of two gives that."""
    byte = vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
    word = arith.extui(_word_type(), mgpu.utils.bitcast(byte, ir.IntegerType.get_signless(8)))
    pair = _e4m3_bits(word, 0x8080, _BFLOAT16)
    for exponent in (_MOST_EXPONENT, _SCALE_EXPONENT + _BFLOAT16.exponent - _MOST_EXPONENT):
        factors, nothing = (_constant(_twice(each, _BFLOAT16)) for each in (2.0**exponent, -0.0))
        pair = _fused(pair, factors, nothing, _BFLOAT16)
    return pair


def _masked(word: Any, mask: int, flipped: int) -> Any:
    """Return the bits of a word below a mask, some of them flipped, by one instruction."""
    return _instruction("lop3.b32", word, _constant(mask), _constant(flipped), table="0x6a")


def _multiplied(pair: Any, wide: _Wide, scale: float, offset: float) -> Any:
    """Return two numbers, given by their bits, times `scale` plus `offset`."""
    factors, offsets = (_constant(_twice(each, wide)) for each in (scale, offset))
    return _as_pair(_fused(pair, factors, offsets, wide), wide)


def _fused(pair: Any, factors: Any, offsets: Any, wide: _Wide) -> Any:
    """Return the bits of two numbers times two others plus two others, all given by their bits."""
    return _instruction(f"fma.rn.{wide.name}x2", pair, factors, offsets)


def _as_pair(word: Any, wide: _Wide) -> Any:
    dtype = ir.F16Type.get() if wide is _FLOAT16 else ir.BF16Type.get()
    return mgpu.utils.bitcast(word, ir.VectorType.get((2,), dtype))


def _twice(number: float, wide: _Wide) -> int:
    """Return the bits of a pair of equal numbers, which have to hold the number exactly."""
    if wide is _FLOAT16:
        return int(np.float16(number).view(np.uint16)) * 0x10001
    return int.from_bytes(struct.pack(">f", number)[:2]) * 0x10001


def _word_type() -> Any:
    return ir.IntegerType.get_signless(32)


def _constant(bits: int) -> Any:
    return mgpu.utils.c(bits - (bits >> 31 << 32), _word_type())


def _instruction(name: str, *operands: Any, table: str | None = None) -> Any:
    places = [*(f"${i}" for i in range(len(operands) + 1)), *([] if table is None else [table])]
    return llvm.inline_asm(_word_type(), operands, f"{name} {', '.join(places)};", "=r" + ",r" * len(operands))
