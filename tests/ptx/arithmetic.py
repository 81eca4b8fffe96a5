"""Arithmetic, comparisons and conversions: what threads compute each for themselves.

Modelled, from the PTX ISA ("Integer Arithmetic Instructions" to "Data Movement and Conversion Instructions"): results as
they are defined there, rounded to nearest. Not modelled: the errors of approximations (`ex2.approx`, `tanh.approx`,
`div.full` are as exact as numpy's), the last bit of `fma` (it is computed in float64, which is then rounded), subnormal
numbers that `.ftz` makes zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.ptx.hazards import NotModelled
from tests.ptx.machine import WARP, Lanes, Step, Warp
from tests.ptx.operands import TYPES, Decoder, reader, writer
from tests.ptx.parser import Instruction, Source, elements

Function = Callable[..., Lanes]
_UNDEFINED = -1


def _each(function: Function, result: str, *arguments: str) -> Decoder:
    """An instruction that computes its first operand, of the type `result`, from the others."""
    dtype = TYPES[result]

    def decode(instruction: Instruction, source: Source) -> Step:
        target, *operands = instruction.operands
        write = writer(source, target)
        read = [reader(source, operand, name) for operand, name in zip(operands, arguments, strict=True)]

        def step(warp: Warp) -> None:
            write(warp, function(*[one(warp) for one in read]).astype(dtype, copy=False))

        return step

    return decode


def _typed(name: str, function: Function, num_arguments: int, types: str) -> dict[str, Decoder]:
    """Decode an instruction for several types, its arguments all of the result's type."""
    return {f"{name}.{each}": _each(function, each, *[each] * num_arguments) for each in types.split()}


def _fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    exact: Lanes = a.astype(np.float64) * b + c
    return exact


def _high(a: Lanes, b: Lanes) -> Lanes:
    bits = 8 * a.itemsize
    high = (a.astype(object) * b.astype(object)) >> bits
    out: Lanes = (high % (1 << bits)).astype(f"uint{bits}").view(a.dtype)
    return out


def _wide(a: Lanes, b: Lanes) -> Lanes:
    dtype = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
    out: Lanes = a.astype(dtype) * b.astype(dtype)
    return out


def _shift_left(a: Lanes, count: Lanes) -> Lanes:
    bits = 8 * a.itemsize
    return np.where(count >= bits, 0, a << np.minimum(count, bits - 1).astype(a.dtype))


def _shift_right(a: Lanes, count: Lanes) -> Lanes:
    bits = 8 * a.itemsize
    shifted: Lanes = a >> np.minimum(count, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(count >= bits, 0, shifted)


def _extracted(a: Lanes, start: Lanes, length: Lanes) -> Lanes:
    """`bfe` of fields that lie within the number."""
    bits = 8 * a.itemsize
    if ((start + length > bits) | (length == 0)).any():
        raise NotModelled("bfe: a field that is not all within the number")
    above = (bits - start - length).astype(a.dtype)
    out: Lanes = (a << above) >> (bits - length).astype(a.dtype)
    return out


def _permuted(a: Lanes, b: Lanes, selectors: Lanes) -> Lanes:
    """`prmt`: each byte of the result is one of the eight of a and b, or the sign of one."""
    pool = np.stack([a, b], 1).view(np.uint8)
    out = np.empty((WARP, 4), np.uint8)
    for i in range(4):
        nibble = (selectors >> np.uint32(4 * i)) & np.uint32(15)
        byte = pool[np.arange(WARP), nibble & 7]
        out[:, i] = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
    return out.view(np.uint32).reshape(WARP)


def _halves_subtracted(a: Lanes, b: Lanes) -> Lanes:
    wide = a.view(ml_dtypes.bfloat16).astype(np.float32) - b.view(ml_dtypes.bfloat16).astype(np.float32)
    out: Lanes = wide.astype(ml_dtypes.bfloat16).view(np.uint32)
    return out


def _halves_fused(dtype: Any) -> Function:
    """Two numbers of 16 bits times two others, plus two more, rounded once."""

    def fuse(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        exact = _wide_halves(a, dtype) * _wide_halves(b, dtype) + _wide_halves(c, dtype)
        out: Lanes = exact.astype(dtype).view(np.uint32)
        return out

    return fuse


def _wide_halves(words: Lanes, dtype: Any) -> Lanes:
    """Return pairs of numbers in float64, subnormal ones as well, which the threads of XLA would make zero."""
    kind = ml_dtypes.finfo(dtype)
    bits, hidden = words.view(np.uint16).astype(np.int32), 1 << kind.nmant
    exponents, digits = bits >> kind.nmant & ((1 << kind.nexp) - 1), bits & (hidden - 1)
    if (exponents == (1 << kind.nexp) - 1).any():
        raise NotModelled(f"fma of {kind.dtype}: infinity or NaN")
    significands = np.where(exponents == 0, digits, digits | hidden).astype(np.float64)
    sizes = np.ldexp(significands, np.maximum(exponents, 1) - 1 + kind.minexp - kind.nmant)
    out: Lanes = np.where(bits >> 15, -sizes, sizes)
    return out


def _both(function: Function) -> Function:
    """Two floats in a register of 64 bits."""

    def each(*pairs: Lanes) -> Lanes:
        out: Lanes = function(*(pair.view(np.float32) for pair in pairs)).astype(np.float32).view(np.uint64)
        return out

    return each


def _pair(dtype: np.dtype) -> Function:
    """Two numbers narrowed into one register; the first argument is the upper half."""

    def convert(high: Lanes, low: Lanes) -> Lanes:
        return np.stack([low.astype(dtype), high.astype(dtype)], 1).view(np.uint32).reshape(WARP)

    return convert


def _widened_pair(narrow: Lanes) -> Lanes:
    pair: Lanes = narrow.view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    return pair.view(np.uint32)


def _identity(numbers: Lanes) -> Lanes:
    return numbers


def _select(a: Lanes, b: Lanes, is_first: Lanes) -> Lanes:
    return np.where(is_first, a, b)


def _funnel_left(low: Lanes, high: Lanes, count: Lanes) -> Lanes:
    """The upper half of two words, shifted left by the count modulo 32."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    return (both << (count & np.uint32(31)).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


_LOGIC = {"(0xf0 & 0xcc) ^ 0xaa": 0x6A, "0x6a": 0x6A}
"""Table of a function of three bits, by the text of the function or of its table."""


def _lop3(instruction: Instruction, source: Source) -> Step:
    *operands, table = instruction.operands
    if table not in _LOGIC:
        raise NotModelled(f"{instruction}: function {table}")
    truth = _LOGIC[table]

    def combine(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        out = np.zeros_like(a)
        for case in range(8):
            if truth >> case & 1:
                parts = [number if case >> bit & 1 else ~number for number, bit in ((a, 2), (b, 1), (c, 0))]
                out |= parts[0] & parts[1] & parts[2]
        return out

    whole = Instruction(instruction.line, instruction.opcode, tuple(operands), instruction.guard)
    return _each(combine, "b32", "b32", "b32", "b32")(whole, source)


def _move(instruction: Instruction, source: Source) -> Step:
    """A register, or the parts of one, from and to vectors. A part that nothing was written to may be moved along."""
    target, origin = instruction.operands
    type_name = instruction.opcode.partition(".")[2]
    if not (target + origin).count("{"):
        return _each(_identity, type_name, type_name)(instruction, source)
    whole = TYPES[type_name]
    count = len(elements(target if target.startswith("{") else origin))
    part = TYPES[f"b{8 * whole.itemsize // count}"]
    if target.startswith("{"):
        read = reader(source, origin, type_name)
        writers = [writer(source, each) for each in elements(target)]

        def unpack(warp: Warp) -> None:
            parts = read(warp).view(part).reshape(WARP, count)
            for i, write in enumerate(writers):
                write(warp, np.ascontiguousarray(parts[:, i]))

        return unpack
    names, declared = elements(origin), source.registers
    readers = [reader(source, each, f"b{8 * part.itemsize}") for each in names]
    undefined = np.full(WARP, _UNDEFINED, f"int{8 * part.itemsize}").view(part)
    pack_into = writer(source, target)

    def pack(warp: Warp) -> None:
        each = zip(names, readers, strict=True)
        parts = [undefined if name in declared and name not in warp.registers else read(warp) for name, read in each]
        pack_into(warp, np.stack(parts, 1).view(whole).reshape(WARP))

    return pack


_COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_CONVERSIONS = ("f32.bf16", "f32.f16", "rn.f16.s16", "rn.f16.s32", "rn.f32.s32", "rn.f32.s16", "rn.f32.u16")
"""Beside those of integers to integers."""


def _not_greater(a: Lanes, b: Lanes) -> Lanes:
    """True as well where one is no number."""
    return ~(a > b)


def _comparisons() -> dict[str, Decoder]:
    table = {}
    types = "b16 b32 b64 s16 s32 s64 u16 u32 u64 f32".split()
    for name, compare, of in (*((*each, types) for each in _COMPARISONS.items()), ("leu", _not_greater, ["f32"])):
        for each in of:
            table[f"setp.{name}.{each}"] = _each(compare, "pred", each, each)
            for joined, join in (("and", np.logical_and), ("or", np.logical_or)):

                def both(a: Lanes, b: Lanes, c: Lanes, compare: Function = compare, join: Function = join) -> Lanes:
                    return join(compare(a, b), c)

                table[f"setp.{name}.{joined}.{each}"] = _each(both, "pred", each, each, "pred")
    return table


def _conversions() -> dict[str, Decoder]:
    table = {}
    integers = [f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64)]
    for name in (*_CONVERSIONS, *(f"{to}.{origin}" for to in integers for origin in integers)):
        to, origin = name.split(".")[-2:]
        table[f"cvt.{name}"] = _each(_identity, to, origin)
    for wide, dtype in (("bf16x2", TYPES["bf16"]), ("f16x2", TYPES["f16"])):
        table[f"cvt.rn.{wide}.f32"] = _each(_pair(dtype), "b32", "f32", "f32")
        table[f"cvt.rn.{wide[:-2]}.f32"] = _each(_identity, wide[:-2], "f32")
    table["cvt.rn.f16x2.e4m3x2"] = _each(_widened_pair, "b32", "b16")
    return table


_INTEGERS = "s16 u16 s32 u32 s64 u64"
TABLE: dict[str, Decoder] = {
    **_typed("add", np.add, 2, f"f32 {_INTEGERS}"),
    **_typed("sub", np.subtract, 2, f"f32 {_INTEGERS}"),
    **_typed("mul", np.multiply, 2, "f32"),
    **_typed("mul.rn", np.multiply, 2, "f32"),
    **_typed("mul.lo", np.multiply, 2, _INTEGERS),
    **_typed("mul.hi", _high, 2, _INTEGERS),
    **{f"mul.wide.{kind}{n}": _each(_wide, f"{kind}{2 * n}", *[f"{kind}{n}"] * 2) for kind in "su" for n in (16, 32)},
    **_typed("mad.lo", lambda a, b, c: a * b + c, 3, _INTEGERS),
    **_typed("fma.rn", _fused, 3, "f32"),
    **_typed("div.full", np.divide, 2, "f32"),
    **{
        f"{name}.f32x2": _each(_both(function), *["b64"] * (1 + count))
        for name, function, count in (
            ("add", np.add, 2),
            ("sub", np.subtract, 2),
            ("mul", np.multiply, 2),
            ("fma.rn", _fused, 3),
        )
    },
    **_typed("rcp.approx", np.reciprocal, 1, "f32"),
    **_typed("ex2.approx.ftz", np.exp2, 1, "f32"),
    **_typed("tanh.approx", np.tanh, 1, "f32"),
    **_typed("neg", np.negative, 1, "f32 s16 s32 s64"),
    **_typed("min", np.minimum, 2, _INTEGERS),
    **_typed("max", np.maximum, 2, _INTEGERS),
    **_typed("min.NaN", np.minimum, 2, "f32"),
    **_typed("max.NaN", np.maximum, 2, "f32"),
    **_typed("min", np.fmin, 2, "f32"),
    **_typed("max", np.fmax, 2, "f32"),
    **_typed("and", np.bitwise_and, 2, "pred b16 b32 b64"),
    **_typed("or", np.bitwise_or, 2, "pred b16 b32 b64"),
    **_typed("xor", np.bitwise_xor, 2, "pred b16 b32 b64"),
    **_typed("not", np.invert, 1, "pred b16 b32 b64"),
    **{f"shl.{each}": _each(_shift_left, each, each, "u32") for each in ("b16", "b32", "b64")},
    "shf.l.wrap.b32": _each(_funnel_left, "u32", "u32", "u32", "u32"),
    **{f"shr.{each}": _each(_shift_right, each, each, "u32") for each in _INTEGERS.split()},
    **{f"bfe.{each}": _each(_extracted, each, each, "u32", "u32") for each in ("s32", "u32", "s64", "u64")},
    **{f"selp.{each}": _each(_select, each, each, each, "pred") for each in ("b16", "b32", "b64", "s32", "f32")},
    **{f"mov.{each}": _move for each in ("pred", "b16", "b32", "b64", "u32", "f32")},
    "cvta.to.global.u64": _each(_identity, "u64", "u64"),
    "cvta.param.u64": _each(_identity, "u64", "u64"),
    "prmt.b32": _each(_permuted, "b32", "b32", "b32", "b32"),
    "sub.bf16x2": _each(_halves_subtracted, "b32", "b32", "b32"),
    "fma.rn.bf16x2": _each(_halves_fused(ml_dtypes.bfloat16), "b32", "b32", "b32", "b32"),
    "fma.rn.f16x2": _each(_halves_fused(np.float16), "b32", "b32", "b32", "b32"),
    "lop3.b32": _lop3,
    **_comparisons(),
    **_conversions(),
}
"""By the whole name of an instruction, modifiers and all: another one is not known."""
