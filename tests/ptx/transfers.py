"""Numbers that move: between registers and memory, and from thread to thread of a warp.

Modelled, from the PTX ISA ("Data Movement and Conversion Instructions": `ld`, `st`, `stmatrix`, `ldmatrix`, `shfl.sync`,
`elect.sync`): alignment, bounds, extension of narrow numbers. Not modelled: `ld` and `st` of generic addresses in shared
memory (they are out of bounds here), caches and their hints.
"""

from __future__ import annotations

import re

import numpy as np

from tests.ptx.hazards import NotModelled
from tests.ptx.machine import WARP, Lanes, Step, Warp
from tests.ptx.operands import TYPES, Decoder, address, reader, same, writer
from tests.ptx.parser import Instruction, Source, elements

_TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64")
_VECTORS = ("", ".v2", ".v4")
_ALL_THREADS = "-1"
_ROW_BYTES = 16


def _load(instruction: Instruction, source: Source) -> Step:
    target, origin = instruction.operands
    dtype = TYPES[instruction.opcode.rpartition(".")[2]]
    address_of, writers = address(source, origin), [writer(source, each) for each in elements(target)]
    size, is_shared = dtype.itemsize * len(writers), ".shared" in instruction.opcode

    def step(warp: Warp) -> None:
        where = address_of(warp)
        data = warp.block.shared.load(warp.index, where, size) if is_shared else warp.block.memory.load(where, size)
        numbers = data.view(dtype)
        for i, write in enumerate(writers):
            write(warp, np.ascontiguousarray(numbers[:, i]))

    return step


def _store(instruction: Instruction, source: Source) -> Step:
    target, origin = instruction.operands
    type_name = instruction.opcode.rpartition(".")[2]
    address_of, readers = address(source, target), [reader(source, each, type_name) for each in elements(origin)]
    is_shared = ".shared" in instruction.opcode

    def step(warp: Warp) -> None:
        data = np.stack([read(warp) for read in readers], 1).view(np.uint8)
        if is_shared:
            warp.block.shared.store(warp.index, address_of(warp), data)
        else:
            warp.block.memory.store(address_of(warp), data)

    return step


def _store_matrices(instruction: Instruction, source: Source) -> Step:
    """Matrix m's row r lies where thread 8 m + r says, and comes from four threads: two numbers of 16 bits of each."""
    target, origin = instruction.operands
    address_of, readers = address(source, target), [reader(source, each, "b32") for each in elements(origin)]
    num_rows = 8 * len(readers)

    def step(warp: Warp) -> None:
        rows = np.concatenate([read(warp).view(np.uint8).reshape(8, _ROW_BYTES) for read in readers])
        warp.block.shared.store(warp.index, address_of(warp)[:num_rows], rows)

    return step


def _load_matrices(instruction: Instruction, source: Source) -> Step:
    """Matrix m's row r lies where thread 8 m + r says; four threads get it, two numbers of 16 bits each.

    Transposed, four threads get a column.
    """
    target, origin = instruction.operands
    address_of, writers = address(source, origin), [writer(source, each) for each in elements(target)]
    is_transposed = ".trans." in instruction.opcode

    def step(warp: Warp) -> None:
        rows = warp.block.shared.load(warp.index, address_of(warp)[: 8 * len(writers)], _ROW_BYTES)
        for matrix, write in zip(rows.view(np.uint16).reshape(-1, 8, 8), writers, strict=True):
            numbers = np.ascontiguousarray(matrix.T if is_transposed else matrix)
            write(warp, numbers.reshape(WARP, 2).view(np.uint32).reshape(WARP))

    return step


def _load_parameter(instruction: Instruction, source: Source) -> Step:
    target, origin = instruction.operands
    write, name = writer(source, target), origin.strip("[]")
    if name not in source.parameters:
        raise NotModelled(f"{instruction}: a part of a parameter")
    return lambda warp: write(warp, np.full(WARP, warp.block.launch.parameters[name], np.uint64))


def _shuffle(instruction: Instruction, source: Source) -> Step:
    target, origin, operand, clamp, members = instruction.operands
    if (clamp, members) != ("31", _ALL_THREADS):
        raise NotModelled(f"{instruction}: among some threads only")
    read, read_operand, write = reader(source, origin, "b32"), reader(source, operand, "u32"), writer(source, target)
    is_butterfly = ".bfly." in instruction.opcode

    def step(warp: Warp) -> None:
        lanes = read_operand(warp)
        write(warp, read(warp)[np.arange(WARP) ^ same(lanes) if is_butterfly else lanes % WARP])

    return step


def _largest(instruction: Instruction, source: Source) -> Step:
    target, origin, members = instruction.operands
    read, read_members, write = reader(source, origin, "f32"), reader(source, members, "s32"), writer(source, target)

    def step(warp: Warp) -> None:
        if same(read_members(warp)) != int(_ALL_THREADS):
            raise NotModelled(f"{instruction}: among some threads only")
        write(warp, np.full(WARP, read(warp).max(), np.float32))

    return step


def _elect(instruction: Instruction, source: Source) -> Step:
    target, members = instruction.operands
    names = re.split(r"\s*\|\s*", target)
    if members != _ALL_THREADS or len(names) != 2:
        raise NotModelled(f"{instruction}")
    write_leader, write_is_leader = (writer(source, name) for name in names)
    leader: Lanes = np.zeros(WARP, np.uint32)

    def step(warp: Warp) -> None:
        write_leader(warp, leader)
        write_is_leader(warp, np.arange(WARP) == 0)

    return step


TABLE: dict[str, Decoder] = {
    **{f"ld{space}{v}.{each}": _load for space in ("", ".shared", ".global") for v in _VECTORS for each in _TYPES},
    **{f"st{space}{v}.{each}": _store for space in ("", ".shared", ".global") for v in _VECTORS for each in _TYPES},
    **{f"stmatrix.sync.aligned.m8n8.{count}.shared.b16": _store_matrices for count in ("x1", "x2", "x4")},
    **{
        f"ldmatrix.sync.aligned.m8n8.{n}{t}.shared.b16": _load_matrices
        for n in ("x1", "x2", "x4")
        for t in ("", ".trans")
    },
    "ld.param::entry.b64": _load_parameter,
    "shfl.sync.bfly.b32": _shuffle,
    "shfl.sync.idx.b32": _shuffle,
    "redux.sync.max.NaN.f32": _largest,
    "elect.sync": _elect,
}
