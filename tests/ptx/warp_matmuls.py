"""Matmuls of the tensor cores by one warp, its operands and sums in registers (`mma.sync`).

Modelled, from the PTX ISA ("Matrix Fragments for mma.m16n8k16 with floating point type"): 16 x 16 by 16 x 8 numbers of
16-bit floats, added to float32. Thread t is in group t / 4 and has place t % 4 there. Not modelled: how the hardware
rounds its sums (here: float32), other shapes and types.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.machine import WARP, Step, Warp
from tests.ptx.operands import TYPES, Decoder, reader, writer
from tests.ptx.parser import Instruction, Source, elements

_GROUP, _PLACE = np.arange(WARP)[:, None] // 4, np.arange(WARP)[:, None] % 4
_ROW, _INPUT = np.arange(16)[:, None], np.arange(16)
# Places among the numbers of all registers of an operand: by register, thread and half of its word.
_OF_A = ((_ROW // 8 + _INPUT // 8 * 2) * WARP + _ROW % 8 * 4 + _INPUT % 8 // 2) * 2 + _INPUT % 2
"""Rows by inputs: registers of rows g and g + 8, then the same of inputs from 8 on; two neighbouring inputs each."""
_OF_B = (_ROW // 8 * WARP + np.arange(8) * 4 + _ROW % 8 // 2) * 2 + _ROW % 2
"""Inputs by columns: a register of inputs below 8 of column g, and one of those from 8 on."""
_OF_SUMS = (np.arange(4)[:, None] // 2 * 8 + _GROUP.T) * 8 + 2 * _PLACE.T + np.arange(4)[:, None] % 2
"""Registers by threads: two neighbouring columns of row g, then those of row g + 8."""


def _multiply(instruction: Instruction, source: Source) -> Step:
    dtype = TYPES[instruction.opcode.split(".")[-2]]
    sums, *operands = (elements(each) for each in instruction.operands)
    writers = [writer(source, name) for name in sums]
    read_a, read_b = ([reader(source, name, "b32") for name in names] for names in operands[:2])
    read_c = [reader(source, name, "f32") for name in operands[2]]
    assert (len(writers), len(read_a), len(read_b), len(read_c)) == (4, 4, 2, 4), instruction

    def step(warp: Warp) -> None:
        a, b = (
            np.concatenate([read(warp) for read in readers]).view(dtype).astype(np.float32)
            for readers in (read_a, read_b)
        )
        result = np.stack([read(warp) for read in read_c]) + (a[_OF_A] @ b[_OF_B]).reshape(-1)[_OF_SUMS]
        for write, numbers in zip(writers, result, strict=True):
            write(warp, numbers)

    return step


TABLE: dict[str, Decoder] = {
    f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32": _multiply for dtype in ("bf16", "f16")
}
