"""A grid of thread blocks, one after the other, whose warps take turns in random order.

A warp runs until it meets others (a barrier, the start or the wait of something asynchronous), then another one is
chosen, some more often than others: they get far ahead. Copies and matmuls that are started are done at some later time:
at random ones, at the latest when they are waited for; those of `cp.async` exactly then. So a kernel sees orders that a device shows rarely, and each of
them again by its seed.

Modelled, from the PTX ISA ("Asynchronous Operations", "Control Flow Instructions"): the above; a deadlock; a block that
ends while a copy reads its shared memory, or in the middle of a barrier's phase.

Threads of a warp that part are modelled where some skip what one of them starts (`_BY_SOME_THREADS`).

Not modelled: other branches of some threads of a warp (refused), warps that leave the lockstep of their instruction,
blocks that run at the same time, clusters, how many registers there are, and time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.barriers import ThreadBarrier, TransactionBarrier
from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.memory import GlobalMemory, SharedMemory
from tests.ptx.parser import Instruction
from tests.ptx.races import Races
from tests.ptx.tensor_map import TensorMap
from tests.ptx.tensor_memory import TensorMemory, Use

WARP = 32
_ALL = np.ones(WARP, np.bool_)
_ALL.setflags(write=False)
_SLOWEST = 0.003
"""Turns of a warp for each of another: some are far ahead of others."""
_BY_SOME_THREADS = (
    *(
        "add.",
        "and.",
        "bfe.",
        "bra",
        "cvt.",
        "mov.",
        "mul.",
        "not.",
        "or.",
        "selp.",
        "setp.",
        "shl.",
        "shr.",
        "sub.",
        "xor.",
    ),
    *("tcgen05.mma.", "tcgen05.commit."),
)
"""Instructions that some threads of a warp may execute while the others wait."""
Lanes = npt.NDArray[Any]
"""One number for each thread of a warp."""
Step = Callable[["Warp"], None]
"""An instruction as a warp executes it."""


@dataclass(frozen=True)
class Schedule:
    """The random order of a launch."""

    seed: int
    copies: float
    """The chance that a copy is done before the next warp's turn."""
    matmuls: float
    """The chance that matmuls are done when another one is started, and not only where they are waited for."""


@dataclass(frozen=True)
class Program:
    """A kernel, ready to run."""

    instructions: Sequence[Instruction]
    steps: Sequence[Step]


@dataclass(frozen=True)
class Launch:
    """The parameters that the host passes to a kernel."""

    grid: int
    num_threads: int
    shared_bytes: int
    parameters: Mapping[str, int]
    tensor_maps: Mapping[int, TensorMap]
    """By address."""


class Task:
    """An asynchronous action: done once, when it is first needed."""

    def __init__(self, action: Callable[[], None], registers: Sequence[str] = ()) -> None:
        self._action: Callable[[], None] | None = action
        self.registers = registers
        """Registers that it changes."""

    @property
    def is_done(self) -> bool:
        return self._action is None

    def finish(self) -> None:
        if self._action is not None:
            action, self._action = self._action, None
            action()


@dataclass
class Groups:
    """Tasks that a warp has started, and groups of them that it has committed."""

    started: list[Task] = field(default_factory=list)
    committed: list[list[Task]] = field(default_factory=list)

    def commit(self) -> None:
        self.committed.append(self.started)
        self.started = []

    def wait(self, num_left: int) -> None:
        """Until no more than so many of the last groups are pending."""
        while len(self.committed) > num_left:
            for task in self.committed.pop(0):
                task.finish()

    @property
    def not_waited_for(self) -> list[Task]:
        """In order; they may be done."""
        return [task for group in [*self.committed, self.started] for task in group]


class Warp:
    """32 threads in lockstep."""

    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.index = index
        self.registers: dict[str, Lanes] = {}
        self.fenced: dict[str, Lanes] = {}
        """Registers as they were at the last `wgmma.fence`, or as matmuls have left them."""
        self.sums: dict[str, Lanes] = {}
        """Registers that belong to matmuls until these are waited for."""
        self.threads = np.arange(WARP, dtype=np.uint32) + np.uint32(WARP * index)
        self.pace = _SLOWEST ** block.chance.random()
        self.copies = Groups()
        """Bulk copies out of shared memory."""
        self.small_copies = Groups()
        """Copies of `cp.async`: done where they are waited for, and no sooner."""
        self.matmuls = Groups()
        self.some: Lanes | None = None
        """The threads that execute while the others wait for them; None: all execute."""
        self._meeting = 0
        """Place where the others wait."""
        self._place = 0
        self._is_paused = False
        self._can_go_on: Callable[[], bool] | None = None

    @property
    def is_done(self) -> bool:
        return self._place >= len(self.block.program.steps)

    @property
    def is_ready(self) -> bool:
        return self._can_go_on is None or self._can_go_on()

    @property
    def here(self) -> Lanes:
        """True for the threads that execute."""
        return _ALL if self.some is None else self.some

    @property
    def instruction(self) -> Instruction:
        """The last one that was begun."""
        return self.block.program.instructions[self._place - 1]

    def run(self) -> None:
        """Until the next pause, or the end."""
        self._is_paused, self._can_go_on = False, None
        steps = self.block.program.steps
        while not self._is_paused and self._place < len(steps):
            if self.some is not None:
                self._check_some()
            self._place += 1
            steps[self._place - 1](self)
        groups = (self.copies, self.small_copies, self.matmuls)
        if self.is_done and any(each.not_waited_for for each in groups):
            raise Hazard(f"warp {self.index} ended and did not wait for its copies and matmuls")

    def jump(self, place: int) -> None:
        self._place = place

    def part(self, some: Lanes, place: int) -> None:
        """Let some threads go on alone, until they come to the place that the others jump to."""
        if self.some is not None:
            raise NotModelled(f"{self.instruction}: threads of a warp part")
        self.some, self._meeting = some, place

    def _check_some(self) -> None:
        """Join the others if this is where they wait."""
        if self._place == self._meeting:
            self.some = None
        elif not self.block.program.instructions[self._place].opcode.startswith(_BY_SOME_THREADS):
            raise NotModelled(f"{self.block.program.instructions[self._place]}: by some threads of a warp")

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Let others run; go on when the condition holds."""
        self._is_paused, self._can_go_on = True, until


class Block:
    """The warps of one thread block, their shared memory and what is on its way to it."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        memory: GlobalMemory,
        index: int,
        schedule: Schedule,
        chance: random.Random,
    ) -> None:
        self.program = program
        self.launch = launch
        self.memory = memory
        self.index = index
        self.schedule = schedule
        self.chance = chance
        self.shared = SharedMemory(launch.shared_bytes, self._races())
        self.tensor_memory = TensorMemory()
        self.matmuls: list[tuple[Use, Task]] = []
        """Matmuls into tensor memory that are not done, in order."""
        self.barriers: dict[int, TransactionBarrier] = {}
        """By address."""
        self.thread_barriers: dict[int, ThreadBarrier] = {}
        self.pending: list[Task] = []
        """Copies, in any order."""
        self._warps = [Warp(self, i) for i in range(launch.num_threads // WARP)]

    def _races(self) -> Races | None:
        if any(each.opcode.startswith("mbarrier") for each in self.program.instructions):
            return None
        return Races(self.launch.shared_bytes, self.launch.num_threads // WARP)

    def barrier(self, address: int) -> TransactionBarrier:
        if address not in self.barriers:
            raise Hazard(f"no barrier was made at {address}")
        return self.barriers[address]

    def run(self) -> None:
        alive = list(self._warps)
        while alive:
            ready = [warp for warp in alive if warp.is_ready]
            if self.pending and (not ready or self.chance.random() < self.schedule.copies):
                self.pending.pop(self.chance.randrange(len(self.pending))).finish()
                continue
            if not ready:
                raise Hazard("deadlock: " + "; ".join(f"warp {warp.index} at {warp.instruction}" for warp in alive))
            (warp,) = self.chance.choices(ready, [warp.pace for warp in ready])
            try:
                warp.run()
            except Hazard as hazard:
                hazard.add_note(f"block {self.index}, warp {warp.index}, {warp.instruction}")
                raise
            if warp.is_done:
                alive.remove(warp)
        if any(not task.is_done for task in self.pending):
            raise Hazard("the block ended while a copy was on its way")
        if self.tensor_memory.is_allocated:
            raise Hazard("the block ended and did not free its tensor memory")
        for address, barrier in self.barriers.items():
            if not barrier.is_between_phases:
                raise Hazard(f"the block ended in a phase of the barrier at {address}: {barrier}")


def run_grid(program: Program, launch: Launch, memory: GlobalMemory, schedule: Schedule) -> None:
    """All blocks, in random order. Raises Hazard."""
    chance = random.Random(schedule.seed)
    order = list(range(launch.grid))
    chance.shuffle(order)
    with np.errstate(all="ignore"):  # kernels compute with rubbish that is never read
        for index in order:
            Block(program, launch, memory, index, schedule, chance).run()
