"""Instructions as steps of the machine: all that are known, by their whole names."""

from __future__ import annotations

from tests.ptx import arithmetic, control, copies, matmuls, small_copies, tensor_matmuls, transfers, warp_matmuls
from tests.ptx.hazards import NotModelled
from tests.ptx.machine import Program
from tests.ptx.operands import Decoder
from tests.ptx.parser import Source

_MODULES = (arithmetic, control, copies, matmuls, small_copies, tensor_matmuls, transfers, warp_matmuls)
_TABLE: dict[str, Decoder] = {name: decoder for module in _MODULES for name, decoder in module.TABLE.items()}
_GUARDED = control.GUARDED | copies.GUARDED


def decode(source: Source) -> Program:
    """Raises NotModelled for any instruction, modifier, operand or guard that the emulator does not know."""
    steps = []
    for instruction in source.instructions:
        if instruction.opcode not in _TABLE:
            raise NotModelled(f"unknown instruction, {instruction}")
        if instruction.guard is not None and instruction.opcode not in _GUARDED:
            raise NotModelled(f"a guard is not minded, {instruction}")
        steps.append(_TABLE[instruction.opcode](instruction, source))
    return Program(source.instructions, steps)
