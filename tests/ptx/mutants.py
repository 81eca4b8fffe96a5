"""A launched kernel with some of its instructions left out: what must not go unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.ptx.hazards import Hazard
from tests.ptx.launch import Launched
from tests.ptx.machine import WARP, Program, Schedule, Step, Warp
from tests.ptx.parser import Instruction

_FETCHER = "setmaxnreg.dec"
"""It gives registers away, then come its instructions; workers take some."""


@dataclass(frozen=True)
class Mutants:
    """A kernel that was launched, to be launched again without some instructions."""

    launched: Launched
    schedules: Sequence[Schedule]

    def run(self, is_dropped: Callable[[Instruction], bool], schedule: Schedule) -> bytes:
        """Return the result of the kernel without some instructions."""
        given = self.launched
        instructions, steps = given.compiled.program.instructions, given.compiled.program.steps
        kept = [
            _left_out(instruction) if is_dropped(instruction) else step
            for instruction, step in zip(instructions, steps, strict=True)
        ]
        mutant = replace(given.compiled, program=Program(instructions, kept))
        return mutant.run(given.operands, given.kinds, schedule)[0].data.tobytes()

    def is_caught(self, is_dropped: Callable[[Instruction], bool]) -> bool:
        """Return True if any schedule shows that something is missing."""
        made = self.launched.results[0].data.tobytes()
        for schedule in self.schedules:
            try:
                if self.run(is_dropped, schedule) != made:
                    return True
            except Hazard:
                return True
        return False

    def of(self, opcode: str, *, in_fetcher: bool | None = None) -> list[Instruction]:
        """The instructions whose names begin so, of the fetcher, of the workers or of all."""
        found, is_fetcher = [], False
        for instruction in self.launched.compiled.source.instructions:
            if instruction.opcode.startswith("setmaxnreg"):
                is_fetcher = instruction.opcode.startswith(_FETCHER)
            if instruction.opcode.startswith(opcode) and in_fetcher in (None, is_fetcher):
                found.append(instruction)
        assert found, opcode
        return found


def _left_out(instruction: Instruction) -> Step:
    """Nothing, but for the answer of a wait, without which it would be asked for again."""

    def step(warp: Warp) -> None:
        if ".try_wait." in instruction.opcode:
            warp.registers[instruction.operands[0]] = np.ones(WARP, np.bool_)
        warp.pause()

    return step
