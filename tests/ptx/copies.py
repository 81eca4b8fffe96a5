"""Bulk copies between device memory and shared memory: started by one thread, done at any later time.

Modelled, from the PTX ISA ("Data Movement and Conversion Instructions: Bulk copy", "Async proxy"): copies of boxes in
both directions and of plain bytes out of shared memory, what they touch and when; groups of those that go out. Copies
into shared memory give their bytes to a barrier. Not modelled: copies to other blocks, reductions, prefetches, hints,
`.read` waits (refused). Groups are those of a warp: only one thread of each starts copies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.hazards import Hazard
from tests.ptx.machine import Step, Task, Warp
from tests.ptx.operands import Decoder, Reader, active, address, reader
from tests.ptx.parser import Instruction, Source, elements
from tests.ptx.tensor_map import TensorMap

_DIMENSIONS = (2, 3, 4, 5)
_PLAIN_ALIGNMENT = 16
_Place = Callable[[Warp, int], tuple[TensorMap, list[int]]]


def _place(source: Source, operand: str) -> _Place:
    """Reads `[map, {coordinates}]` as one thread has it: the innermost coordinate is written first."""
    name, _, coordinates = operand.strip("[]").partition(",")
    read_map = reader(source, name.strip(), "u64")
    read = [reader(source, each, "s32") for each in elements(coordinates.strip())]

    def place(warp: Warp, lane: int) -> tuple[TensorMap, list[int]]:
        where = int(read_map(warp)[lane])
        if where not in warp.block.launch.tensor_maps:
            raise Hazard(f"no tensor map is at {where:#x}")
        return warp.block.launch.tensor_maps[where], [int(each(warp)[lane]) for each in reversed(read)]

    return place


def _load(instruction: Instruction, source: Source) -> Step:
    target, box, barrier_operand = instruction.operands
    target_of, barrier_of, place = address(source, target), address(source, barrier_operand), _place(source, box)

    def action(warp: Warp, lane: int) -> Callable[[], None]:
        tensor_map, begin = place(warp, lane)
        where = tensor_map.shared_addresses(int(target_of(warp)[lane]))
        store = warp.block.shared.reserve(where, "a bulk copy")
        barrier = warp.block.barrier(int(barrier_of(warp)[lane]))

        def copy() -> None:
            store(tensor_map.read(begin))
            barrier.receive(tensor_map.num_bytes)

        return copy

    return _started(active(instruction, source), action, is_outward=False)


def _store(instruction: Instruction, source: Source) -> Step:
    box, origin = instruction.operands
    origin_of, place = address(source, origin), _place(source, box)

    def action(warp: Warp, lane: int) -> Callable[[], None]:
        tensor_map, begin = place(warp, lane)
        where = tensor_map.shared_addresses(int(origin_of(warp)[lane]))
        load = warp.block.shared.lend(where, "a bulk copy")
        return lambda: tensor_map.write(begin, load())

    return _started(active(instruction, source), action, is_outward=True)


def _store_plain(instruction: Instruction, source: Source) -> Step:
    target, origin, size = instruction.operands
    target_of, origin_of, size_of = address(source, target), address(source, origin), reader(source, size, "u32")

    def action(warp: Warp, lane: int) -> Callable[[], None]:
        to, where = target_of(warp)[lane : lane + 1], int(origin_of(warp)[lane])
        num_bytes = int(size_of(warp)[lane])
        if any(each % _PLAIN_ALIGNMENT for each in (int(to[0]), where, num_bytes)):
            raise Hazard(f"a bulk copy is not aligned: {num_bytes} bytes from {where} to {int(to[0]):#x}")
        load = warp.block.shared.lend(where + np.arange(num_bytes), "a bulk copy")
        return lambda: warp.block.memory.store(to, load()[None])

    return _started(active(instruction, source), action, is_outward=True)


def _started(is_active: Reader, action: Callable[[Warp, int], Callable[[], None]], *, is_outward: bool) -> Step:
    """Starts a copy for each active thread."""

    def step(warp: Warp) -> None:
        for lane in np.flatnonzero(is_active(warp)):
            task = Task(action(warp, int(lane)))
            warp.block.pending.append(task)
            if is_outward:
                warp.copies.started.append(task)
        warp.pause()

    return step


def _commit(instruction: Instruction, source: Source) -> Step:
    return lambda warp: warp.copies.commit()


def _wait(instruction: Instruction, source: Source) -> Step:
    (num_left,) = instruction.operands

    def step(warp: Warp) -> None:
        warp.copies.wait(int(num_left))
        warp.pause()

    return step


_IN = "cp.async.bulk.tensor.{}d.shared::{}.global.mbarrier::complete_tx::bytes"
_OUT = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"
TABLE: dict[str, Decoder] = {
    **{_IN.format(count, space): _load for count in _DIMENSIONS for space in ("cta", "cluster")},
    **{_OUT.format(count): _store for count in _DIMENSIONS},
    "cp.async.bulk.global.shared::cta.bulk_group": _store_plain,
    "cp.async.bulk.commit_group": _commit,
    "cp.async.bulk.wait_group": _wait,
}
GUARDED = frozenset(name for name in TABLE if "shared" in name)
"""Instructions that obey their guard: all that start a copy."""
