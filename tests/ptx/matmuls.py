"""Matmuls of the tensor cores: started by a warpgroup, added to its registers at any later time.

Modelled, from the PTX ISA ("Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Register Fragments
and Shared Memory Matrix Layouts", "Matrix Descriptor Format"): operands of the 16-bit floats, e4m3 and s8 in swizzled
shared memory, both majors of B for 16 bits, A in registers for 16 bits. Until a matmul is waited for, its sums must not
be read or written, nor its operands written. Registers that threads wrote need a `wgmma.fence` before a matmul takes
them.

Not modelled: a zero for `scale-d`, unswizzled operands and a transposed A (refused), that a warpgroup's four warps start
the same matmul, threads that only read registers between matmuls, and how the hardware rounds its sums (here: float32).
Of sums of e4m3 it keeps the first 14 bits of each product, shifted to the largest one, and no others (DeepSeek-V3 report,
section 3.5.2).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.machine import WARP, Lanes, Step, Task, Warp
from tests.ptx.memory import Addresses, swizzled
from tests.ptx.operands import TYPES, Decoder, reader, register, same
from tests.ptx.parser import Instruction, Source, elements

_OPCODE = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|s32)\.(\w+)\.(\w+)")
_NUMBERS = {"bf16": TYPES["bf16"], "f16": TYPES["f16"], "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "s8": TYPES["s8"]}
_SUMS = {"bf16": "f32", "f16": "f32", "e4m3": "f32", "s8": "s32"}
_E4M3_BITS = 14
"""Bits of each product, and of the sum so far, that a matmul of e4m3 adds."""
_DEPTH_BYTES = 32
"""Bytes of the inputs of one matmul."""
_ROWS = 16
"""Rows of A and of the sums, in each of the four warps."""
_SWIZZLES = {1: 128, 2: 64, 3: 32}
_ATOM = 8
"""Rows after which a swizzled layout goes on elsewhere."""

_LANE = np.arange(WARP)
_FRAGMENT_ROW, _FRAGMENT_COLUMN = _LANE // 4, _LANE % 4 * 2
Matrix = Callable[[], Lanes]
"""An operand, read when the matmul is done."""
Operand = Callable[[Warp], Matrix]


@dataclass(frozen=True)
class _Descriptor:
    """The layout of an operand in shared memory; sizes in bytes."""

    start: int
    leading: int
    """From one swizzled row of numbers to the next one beside it, where numbers lie along outputs."""
    stride: int
    """From eight rows to the next eight."""
    swizzle: int

    @classmethod
    def of(cls, bits: int) -> _Descriptor:
        if bits >> 49 & 7 or bits >> 62 not in _SWIZZLES:
            raise NotModelled(f"matrix descriptor {bits:#x}")
        start, leading, stride = ((bits >> first & 0x3FFF) << 4 for first in (0, 16, 32))
        return cls(start, leading, stride, _SWIZZLES[bits >> 62])

    def rows(self, first_row: int, num_rows: int) -> Addresses:
        """Return the addresses of rows that lie along the inputs: (rows, bytes)."""
        row = first_row + np.arange(num_rows)[:, None]
        first = self.start + row // _ATOM * self.stride + row % _ATOM * self.swizzle
        return swizzled(first + np.arange(_DEPTH_BYTES), self.swizzle)

    def columns(self, num_columns: int, depth: int, itemsize: int) -> Addresses:
        """Return the addresses of numbers that lie along the outputs: (outputs, inputs, bytes)."""
        per_row = self.swizzle // itemsize
        column, inputs = np.arange(num_columns)[:, None], np.arange(depth)
        first = self.start + column // per_row * self.leading + column % per_row * itemsize
        first = first + inputs // _ATOM * self.stride + inputs % _ATOM * self.swizzle
        return swizzled(first[..., None] + np.arange(itemsize), self.swizzle)


@functools.lru_cache(1 << 12)
def rows_of(bits: int, first_row: int, num_rows: int) -> Addresses:
    return _Descriptor.of(bits).rows(first_row, num_rows)


@functools.lru_cache(1 << 12)
def columns_of(bits: int, num_columns: int, depth: int, itemsize: int) -> Addresses:
    return _Descriptor.of(bits).columns(num_columns, depth, itemsize)


def _in_shared(source: Source, operand: str, addresses: Callable[[Warp, int], Addresses], dtype: np.dtype) -> Operand:
    read = reader(source, operand, "b64")

    def start(warp: Warp) -> Matrix:
        where = addresses(warp, same(read(warp)))
        load = warp.block.shared.lend(where.reshape(-1), "a matmul")
        return lambda: load().view(dtype).reshape(len(where), -1)

    return start


def _in_registers(operand: str, depth: int, dtype: np.dtype) -> Operand:
    """A of 16 bits: four registers of two numbers, of rows r and r + 8, inputs i and i + 8."""
    names = elements(operand)
    places = ((0, 0), (_ATOM, 0), (0, _ATOM), (_ATOM, _ATOM))

    def start(warp: Warp) -> Matrix:
        taken = [_fenced(warp, name) for name in names]

        def matrix() -> Lanes:
            out = np.empty((_ROWS, depth), dtype)
            for name, numbers, (row, column) in zip(names, taken, places, strict=True):
                if warp.registers.get(name) is not numbers:
                    raise Hazard(f"register {name} is written while a matmul reads it")
                pair = numbers.view(dtype).reshape(WARP, 2)
                for i in range(2):
                    out[_FRAGMENT_ROW + row, _FRAGMENT_COLUMN + column + i] = pair[:, i]
            return out

        return matrix

    return start


def _fenced(warp: Warp, name: str) -> Lanes:
    """Return a register, which must not have been written since the last fence."""
    numbers = register(warp, name)
    if warp.fenced.get(name) is not numbers:
        raise Hazard(f"a matmul takes register {name}, written after the last wgmma.fence")
    return numbers


def _operands(instruction: Instruction, source: Source) -> tuple[Operand, Operand]:
    """A and B of a matmul: this warp's rows of A, all columns of B, both with their inputs last."""
    shape = _OPCODE.fullmatch(instruction.opcode)
    assert shape is not None, instruction
    columns, dtype = int(shape[1]), _NUMBERS[shape[4]]
    depth = _DEPTH_BYTES // dtype.itemsize
    _, a, b, _, *flags = instruction.operands
    is_loaded = a.startswith("{")
    if _SUMS[shape[4]] != shape[3] or shape[4] != shape[5] or int(shape[2]) != depth:
        raise NotModelled(str(instruction))
    signs, majors = flags[: 0 if shape[4] == "s8" else 2], flags[0 if shape[4] == "s8" else 2 :]
    num_majors = (1 if is_loaded else 2) if dtype.itemsize == 2 else 0
    if set(signs) - {"1"} or len(majors) != num_majors or "1" in majors[:-1] or (is_loaded and dtype.itemsize != 2):
        raise NotModelled(str(instruction))

    def addresses_of_a(warp: Warp, bits: int) -> Addresses:
        return rows_of(bits, warp.index % 4 * _ROWS, _ROWS)

    def addresses_of_b(warp: Warp, bits: int) -> Addresses:
        if majors[-1:] == ["1"]:
            return columns_of(bits, columns, depth, dtype.itemsize)
        return rows_of(bits, 0, columns)

    of_a = _in_registers(a, depth, dtype) if is_loaded else _in_shared(source, a, addresses_of_a, dtype)
    return of_a, _in_shared(source, b, addresses_of_b, dtype)


def _multiply(instruction: Instruction, source: Source) -> Step:
    shape = _OPCODE.fullmatch(instruction.opcode)
    assert shape is not None, instruction
    of_a, of_b = _operands(instruction, source)
    dtype, names = TYPES[shape[3]], elements(instruction.operands[0])
    index = np.arange(len(names))[:, None]
    rows, columns = _FRAGMENT_ROW + index // 2 % 2 * _ATOM, index // 4 * _ATOM + _FRAGMENT_COLUMN + index % 2
    is_added = reader(source, instruction.operands[3], "pred")

    def step(warp: Warp) -> None:
        if not is_added(warp).all():
            raise NotModelled(f"{instruction}: sums that begin with zero")
        _take(warp, names)
        a, b = of_a(warp), of_b(warp)

        def multiply() -> None:
            x, y = a().astype(dtype), b().astype(dtype)
            before = np.stack([warp.sums[name] for name in names]).view(dtype)
            sums = _cut_sum(before, x[rows] * y[columns]) if shape[4] == "e4m3" else before + (x @ y.T)[rows, columns]
            warp.sums.update(zip(names, sums.view(np.uint32), strict=True))

        warp.matmuls.started.append(Task(multiply, names))
        if warp.block.chance.random() < warp.block.schedule.matmuls:
            for task in warp.matmuls.not_waited_for:
                task.finish()

    return step


def _cut_sum(before: Lanes, added: np.ndarray) -> Lanes:
    """Return the sums of what each lane adds and of those before, all cut to the first bits of the largest."""
    terms = np.concatenate((before[..., None], added), axis=-1).astype(np.float64)
    _, exponents = np.frexp(np.abs(terms).max(-1, keepdims=True))
    cut = np.floor(np.ldexp(terms, _E4M3_BITS - exponents))
    total: Lanes = np.ldexp(cut.sum(-1), exponents[..., 0] - _E4M3_BITS).astype(np.float32)
    return total


def _take(warp: Warp, names: Sequence[str]) -> None:
    """Sums leave the registers, unless they belong to matmuls already."""
    for name in names:
        if name not in warp.sums:
            warp.sums[name] = _fenced(warp, name)
            del warp.registers[name]


def _give_back(warp: Warp) -> None:
    """The sums of matmuls that were waited for; other matmuls may follow without a fence."""
    pending = {name for task in warp.matmuls.not_waited_for for name in task.registers}
    for name in warp.sums.keys() - pending:
        if name in warp.registers:
            raise Hazard(f"register {name} is written while a matmul adds to it")
        warp.registers[name] = warp.fenced[name] = warp.sums.pop(name)


def _commit(instruction: Instruction, source: Source) -> Step:
    return lambda warp: warp.matmuls.commit()


def _wait(instruction: Instruction, source: Source) -> Step:
    (num_left,) = instruction.operands

    def step(warp: Warp) -> None:
        warp.matmuls.wait(int(num_left))
        _give_back(warp)
        warp.pause()

    return step


def _fence(instruction: Instruction, source: Source) -> Step:
    def step(warp: Warp) -> None:
        warp.fenced = dict(warp.registers)

    return step


TABLE: dict[str, Decoder] = {
    "wgmma.fence.sync.aligned": _fence,
    "wgmma.commit_group.sync.aligned": _commit,
    "wgmma.wait_group.sync.aligned": _wait,
    **{
        f"wgmma.mma_async.sync.aligned.m64n{n}k{_DEPTH_BYTES // _NUMBERS[each].itemsize}.{_SUMS[each]}.{each}.{each}": _multiply
        for each in _NUMBERS
        for n in range(8, 257, 8)
    },
}
