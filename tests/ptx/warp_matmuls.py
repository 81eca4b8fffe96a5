"""Matmuls of the tensor cores by one warp, its operands and sums in registers (`mma.sync`).

Modelled, from the PTX ISA ("Matrix Fragments for mma.m16n8k16 with floating point type"): 16 x 16 by 16 x 8 numbers of
16-bit floats, added to float32. Thread t is in group t / 4 and has place t % 4 there. Not modelled: how the hardware
rounds its sums (here: float32), other shapes and types.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.machine import WARP, Lanes, Step, Warp
from tests.ptx.operands import TYPES, Decoder, reader, writer
from tests.ptx.parser import Instruction, Source, elements

_ROWS, _COLUMNS, _DEPTH = 16, 8, 16
_GROUP, _PLACE = np.arange(WARP) // 4, np.arange(WARP) % 4
_HALVES = np.arange(2)


def _pairs(*numbers: Lanes) -> Lanes:
    return np.stack(numbers).reshape(len(numbers), WARP, -1)


def _a(registers: list[Lanes]) -> Lanes:
    """Rows by inputs: registers of rows g and g + 8, then the same of inputs from 8 on; two neighbouring inputs each."""
    out = np.empty((_ROWS, _DEPTH), registers[0].dtype)
    for i, pair in enumerate(_pairs(*registers)):
        rows, inputs = _GROUP[:, None] + 8 * (i % 2), 2 * _PLACE[:, None] + _HALVES + 8 * (i // 2)
        out[rows, inputs] = pair
    return out


def _b(registers: list[Lanes]) -> Lanes:
    """Inputs by columns: a register of inputs below 8 of column g, and one of those from 8 on."""
    out = np.empty((_DEPTH, _COLUMNS), registers[0].dtype)
    for i, pair in enumerate(_pairs(*registers)):
        out[2 * _PLACE[:, None] + _HALVES + 8 * i, np.broadcast_to(_GROUP[:, None], (WARP, 2))] = pair
    return out


def _multiply(instruction: Instruction, source: Source) -> Step:
    dtype = TYPES[instruction.opcode.split(".")[-2]]
    sums, *operands = (elements(each) for each in instruction.operands)
    writers = [writer(source, name) for name in sums]
    read_a, read_b = ([reader(source, name, "b32") for name in names] for names in operands[:2])
    read_c = [reader(source, name, "f32") for name in operands[2]]
    assert (len(writers), len(read_a), len(read_b), len(read_c)) == (4, 4, 2, 4), instruction

    def step(warp: Warp) -> None:
        a, b = _a([read(warp).view(dtype) for read in read_a]), _b([read(warp).view(dtype) for read in read_b])
        result = a.astype(np.float32) @ b.astype(np.float32)
        before = [read(warp) for read in read_c]
        for i, write in enumerate(writers):
            write(warp, before[i] + result[_GROUP + 8 * (i // 2), 2 * _PLACE + i % 2])

    return step


TABLE: dict[str, Decoder] = {
    f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32": _multiply for dtype in ("bf16", "f16")
}
