"""Instructions of the fifth generation of tensor cores: matmuls into tensor memory, which one thread issues.

Modelled, from the PTX ISA ("TensorCore 5th Generation Family Instructions", "Instruction descriptor", "Shared memory
descriptor"): `tcgen05.mma` of bfloat16 or float16 with 128 rows, added in float32 or not; A in tensor memory (two numbers
in a column) or in swizzled shared memory, B in swizzled shared memory, both majors; loads and stores of a row for each
thread; commits, which arrive at a barrier when all matmuls that the thread issued before are done, waits and fences. See
`tensor_memory` for what is a hazard.

Not modelled: pairs of blocks, 64 rows, scales, sparsity, a transposed A (refused), how the hardware rounds its sums (here:
float32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.machine import WARP, Lanes, Step, Task, Warp
from tests.ptx.matmuls import columns_of, rows_of
from tests.ptx.operands import TYPES, Decoder, address, reader, same, writer
from tests.ptx.parser import Instruction, Source, elements
from tests.ptx.tensor_memory import LANES, Columns, Use

_DEPTH = 16
_VERSION = 1 << 46
"""A bit of a descriptor of shared memory that the PTX ISA has always set, and Mosaic GPU has not: not asked for."""
_KINDS = {0: TYPES["f16"], 1: TYPES["bf16"]}
_FLOAT32_SUMS = 1
Matrix = Callable[[], Lanes]


@dataclass(frozen=True)
class _Shape:
    """Fields of an instruction descriptor."""

    dtype: np.dtype
    num_columns: int
    is_b_transposed: bool

    @classmethod
    def of(cls, bits: int) -> _Shape:
        kind, rows = bits >> 7 & 7, (bits >> 24 & 31) << 4
        known = _FLOAT32_SUMS << 4 | kind << 7 | kind << 10 | (bits & 1 << 16) | bits & 63 << 17 | bits & 31 << 24
        if bits != known or kind not in _KINDS or rows != LANES:
            raise NotModelled(f"instruction descriptor {bits:#x}")
        return cls(_KINDS[kind], (bits >> 17 & 63) << 3, bool(bits >> 16 & 1))


def _of_one_thread(warp: Warp, numbers: Lanes) -> int:
    threads = np.flatnonzero(warp.here)
    if len(threads) != 1:
        raise Hazard(f"{len(threads)} threads issue a matmul or a commit")
    return int(numbers[threads[0]])


def _lent(warp: Warp, bits: int, shape: _Shape, num_rows: int, *, is_transposed: bool) -> Matrix:
    """A matrix in shared memory, its inputs last."""
    bits &= ~_VERSION
    where = columns_of(bits, num_rows, _DEPTH, shape.dtype.itemsize) if is_transposed else rows_of(bits, 0, num_rows)
    load = warp.block.shared.lend(where.reshape(-1), "a matmul")
    return lambda: load().view(shape.dtype).reshape(num_rows, _DEPTH)


def _multiply(instruction: Instruction, source: Source) -> Step:
    target, a, b, descriptor, is_added = instruction.operands
    is_a_here = a.startswith("[")
    target_of, read_b, read_shape = address(source, target), reader(source, b, "b64"), reader(source, descriptor, "u32")
    read_added = reader(source, is_added, "pred")
    read_a = address(source, a) if is_a_here else reader(source, a, "b64")

    def step(warp: Warp) -> None:
        memory, shape = warp.block.tensor_memory, _Shape.of(_of_one_thread(warp, read_shape(warp)))
        sums = memory.columns(_of_one_thread(warp, target_of(warp)), shape.num_columns)
        place, added = _of_one_thread(warp, read_a(warp)), bool(_of_one_thread(warp, read_added(warp)))
        packed = _DEPTH * shape.dtype.itemsize // 4
        columns = memory.columns(place, packed) if is_a_here else None
        use = Use(sums, columns, (LANES, shape.num_columns))
        memory.issue(warp.index, use)
        matrix = _here(warp, columns, shape) if columns else _lent(warp, place, shape, LANES, is_transposed=False)
        of_b = _of_one_thread(warp, read_b(warp))
        other = _lent(warp, of_b, shape, shape.num_columns, is_transposed=shape.is_b_transposed)
        before = [task for known, task in warp.block.matmuls if known.pipeline == use.pipeline]

        def multiply() -> None:
            for task in before:
                task.finish()
            result = matrix().astype(np.float32) @ other().astype(np.float32).T
            memory.finish(use, result, is_added=added)
            warp.block.matmuls.remove((use, own))

        own = Task(multiply)
        warp.block.matmuls.append((use, own))
        warp.block.pending.append(own)
        warp.pause()

    return step


def _here(warp: Warp, columns: Columns, shape: _Shape) -> Matrix:
    """A matrix in tensor memory."""
    return lambda: warp.block.tensor_memory.matrix(columns).view(shape.dtype).reshape(LANES, _DEPTH)


def _commit(instruction: Instruction, source: Source) -> Step:
    (barrier_operand,) = instruction.operands
    address_of = address(source, barrier_operand)

    def step(warp: Warp) -> None:
        barrier = warp.block.barrier(_of_one_thread(warp, address_of(warp)))
        before = [task for _, task in warp.block.matmuls]

        def arrive() -> None:
            for task in before:
                task.finish()
            barrier.arrive(1)

        warp.block.pending.append(Task(arrive))
        warp.pause()

    return step


def _load(instruction: Instruction, source: Source) -> Step:
    target, origin = instruction.operands
    writers, address_of = [writer(source, each) for each in elements(target)], address(source, origin)

    def step(warp: Warp) -> None:
        memory = warp.block.tensor_memory
        rows = memory.load(warp.index, memory.columns(same(address_of(warp)), len(writers)))
        for i, write in enumerate(writers):
            write(warp, np.ascontiguousarray(rows[:, i]))

    return step


def _store(instruction: Instruction, source: Source) -> Step:
    target, origin = instruction.operands
    readers, address_of = [reader(source, each, "b32") for each in elements(origin)], address(source, target)

    def step(warp: Warp) -> None:
        memory, words = warp.block.tensor_memory, np.stack([read(warp) for read in readers], 1)
        memory.store(warp.index, memory.columns(same(address_of(warp)), len(readers)), words)

    return step


def _allocate(instruction: Instruction, source: Source) -> Step:
    target, count = instruction.operands
    address_of, read_count = address(source, target), reader(source, count, "u32")

    def step(warp: Warp) -> None:
        place = warp.block.tensor_memory.allocate(same(read_count(warp)))
        words = np.array([[place]], np.uint32).view(np.uint8)
        warp.block.shared.store(warp.index, address_of(warp)[:1], words)

    return step


def _free(instruction: Instruction, source: Source) -> Step:
    read_address, read_count = (reader(source, each, "u32") for each in instruction.operands)
    return lambda warp: warp.block.tensor_memory.free(same(read_address(warp)), same(read_count(warp)))


def _ordered(method: str, *, is_pause: bool = False) -> Decoder:
    """A wait or a fence of a warp: what it does to tensor memory."""

    def decode(instruction: Instruction, source: Source) -> Step:
        def step(warp: Warp) -> None:
            getattr(warp.block.tensor_memory, method)(warp.index)
            if is_pause:
                warp.pause()

        return step

    return decode


def _nothing(instruction: Instruction, source: Source) -> Step:
    return lambda warp: None


_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
TABLE: dict[str, Decoder] = {
    "tcgen05.mma.cta_group::1.kind::f16": _multiply,
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64": _commit,
    **{f"tcgen05.ld.sync.aligned.{WARP}x32b.x{count}.b32": _load for count in _COUNTS},
    **{f"tcgen05.st.sync.aligned.{WARP}x32b.x{count}.b32": _store for count in _COUNTS},
    "tcgen05.wait::ld.sync.aligned": _ordered("wait_loads", is_pause=True),
    "tcgen05.wait::st.sync.aligned": _ordered("wait_stores", is_pause=True),
    "tcgen05.fence::before_thread_sync": _ordered("fence_before"),
    "tcgen05.fence::after_thread_sync": _ordered("fence_after"),
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32": _allocate,
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned": _nothing,
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32": _free,
}
