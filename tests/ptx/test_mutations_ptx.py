"""The emulator can be trusted: where a kernel lacks one of its waits, arrivals or fences, it says so.

One kernel of products with experts has all of them: a ring that is filled by bulk copies, products that are waited for
late, results that leave through shared memory. Its PTX is run as it is, and with instructions left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.grouped_matmul.cases import Case, operands
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning

from tests.ptx.hazards import Hazard
from tests.ptx.launch import Launched, emulated
from tests.ptx.machine import WARP, Program, Schedule, Step, Warp
from tests.ptx.parser import Instruction

pytestmark = [pytest.mark.aot, pytest.mark.slow]

CASE = Case((3, 0, 20), 128, 256)
SIZES = GroupedTuning(rows=64, outputs=64, inputs=64, stages=2, programs=2)
SCHEDULES = [
    Schedule(seed=0, copies=0.3, products=0.3),
    Schedule(seed=1, copies=0.03, products=0.0),
    Schedule(seed=2, copies=0.005, products=0.2),
]
_FETCHER = "setmaxnreg.dec"
"""It gives registers away, then come its instructions; workers take some."""


@dataclass(frozen=True)
class Mutants:
    """A kernel that was launched, to be launched again without some instructions."""

    launched: Launched

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
        for schedule in SCHEDULES:
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


@pytest.fixture(scope="module")
def mutants() -> Mutants:
    x, weight, group_sizes, _ = operands(CASE)
    with emulated(SCHEDULES) as launches:
        from jaxserve_kernels.grouped_matmul.gpu import whole

        whole.grouped_matmul(*map(jnp.asarray, (x, weight, group_sizes)), tuning=SIZES)
    return Mutants(launches[-1])


def test_the_kernel_as_it_is_makes_the_same_in_any_order(mutants: Mutants) -> None:
    assert not mutants.is_caught(lambda instruction: False)


@pytest.mark.parametrize(
    "opcode",
    [
        "fence.proxy.async",
        "wgmma.fence",
        "mbarrier.arrive.release",
        "mbarrier.arrive.expect_tx",
        "cp.async.bulk.tensor.4d.shared",
    ],
)
def test_any_single_one_that_is_missing_is_caught(mutants: Mutants, opcode: str) -> None:
    for missing in mutants.of(opcode):
        assert mutants.is_caught(missing.__eq__), missing


@pytest.mark.parametrize(
    ("opcode", "in_fetcher"),
    [
        ("mbarrier.try_wait", True),  # for slots of the ring that are free
        ("mbarrier.try_wait", False),  # for slots that are filled
        ("cp.async.bulk.wait_group", False),
        ("wgmma.wait_group", False),
    ],
    ids=["free", "filled", "stored", "multiplied"],
)
def test_missing_waits_are_caught(mutants: Mutants, opcode: str, in_fetcher: bool) -> None:
    missing = mutants.of(opcode, in_fetcher=in_fetcher)
    assert mutants.is_caught(lambda instruction: instruction in missing)
