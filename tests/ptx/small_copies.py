"""Copies of 4 to 16 bytes by each thread, from device memory into shared memory (`cp.async`).

Modelled, from the PTX ISA ("Data Movement and Conversion Instructions: Non-bulk copy"): groups of copies in order, and
waits for all but the last few of them. Bytes arrive when their warp waits, and no sooner, so that a wait that is missing
or counts wrongly is a hazard in every run. Threads of a warp share their groups here: they are in lockstep. Not modelled:
`ignore-src`, zero fill, hints for caches (refused), `cp.async.wait_all`, arrivals at an mbarrier.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.hazards import NotModelled
from tests.ptx.machine import Step, Task, Warp
from tests.ptx.memory import check_alignment
from tests.ptx.operands import Decoder, address
from tests.ptx.parser import Instruction, Source

_SIZES = {"ca": (4, 8, 16), "cg": (16,)}
"""Bytes that a thread may copy, by the cache that it copies through."""


def _copy(instruction: Instruction, source: Source) -> Step:
    target, origin, *sizes = instruction.operands
    if len(sizes) != 1 or not sizes[0].isdigit() or int(sizes[0]) not in _SIZES[instruction.opcode.split(".")[2]]:
        raise NotModelled(str(instruction))
    size, target_of, origin_of = int(sizes[0]), address(source, target), address(source, origin)

    def step(warp: Warp) -> None:
        to, where = target_of(warp), origin_of(warp)
        for addresses in (to, where):
            check_alignment(addresses, size)
        store = warp.block.shared.expect(warp.index, to[:, None] + np.arange(size))
        warp.small_copies.started.append(Task(_action(warp, store, where, size)))

    return step


def _action(warp: Warp, store: Callable[[np.ndarray], None], where: np.ndarray, size: int) -> Callable[[], None]:
    return lambda: store(warp.block.memory.load(where, size))


def _commit(instruction: Instruction, source: Source) -> Step:
    return lambda warp: warp.small_copies.commit()


def _wait(instruction: Instruction, source: Source) -> Step:
    (num_left,) = instruction.operands

    def step(warp: Warp) -> None:
        warp.small_copies.wait(int(num_left))
        warp.pause()

    return step


TABLE: dict[str, Decoder] = {
    **{f"cp.async.{cache}.shared.global": _copy for cache in _SIZES},
    "cp.async.commit_group": _commit,
    "cp.async.wait_group": _wait,
}
