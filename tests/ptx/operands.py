"""Instructions' reads and writes of registers, immediates and addresses.

Modelled, from the PTX ISA ("Operands", "Operand Size Exceeding Instruction-Type Size"): a wide register is cut to the
type that is read; a narrow result is extended to its register, by its sign if the type has one. A read of an unwritten
register is a hazard.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.ptx.hazards import Hazard, NotModelled
from tests.ptx.machine import WARP, Lanes, Step, Warp
from tests.ptx.memory import SHARED_BASE, Addresses
from tests.ptx.parser import PREDICATE, Instruction, Source

Reader = Callable[[Warp], Lanes]
Writer = Callable[[Warp, Lanes], None]
Decoder = Callable[[Instruction, Source], Step]
"""Makes a step of an instruction with its operands."""

TYPES: dict[str, np.dtype] = {
    **{f"b{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    PREDICATE: np.dtype(np.bool_),
}
_SHARED = "__dynamic_shmem__0"
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0f([0-9A-Fa-f]{8})")
_ADDRESS = re.compile(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]")
PARAMETER_BASE = 1 << 40
"""Address of what is passed by value: the tensor maps."""


def _unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"uint{8 * dtype.itemsize}")


def reader(source: Source, operand: str, type_name: str) -> Reader:
    """Reads an operand as numbers of a type."""
    if type_name == PREDICATE:
        return _predicate(source, operand)
    dtype = TYPES[type_name]
    constant = _constant(source, operand, dtype)
    if constant is not None:
        return lambda warp: constant
    if operand == "%tid.x":
        return lambda warp: warp.threads.view(dtype)
    if operand == "%ctaid.x":
        return lambda warp: np.full(WARP, warp.block.index, np.uint32).view(dtype)
    if source.registers.get(operand, PREDICATE) == PREDICATE:
        raise NotModelled(f"operand {operand}")
    unsigned = _unsigned(dtype)

    def read(warp: Warp) -> Lanes:
        numbers = register(warp, operand)
        return (numbers if numbers.dtype == unsigned else numbers.astype(unsigned)).view(dtype)

    return read


def register(warp: Warp, name: str) -> Lanes:
    numbers = warp.registers.get(name)
    if numbers is None:
        raise Hazard(f"register {name} is read before anything was written to it, or while a matmul adds to it")
    return numbers


def _constant(source: Source, operand: str, dtype: np.dtype) -> Lanes | None:
    bits = 8 * dtype.itemsize
    if found := _FLOAT.fullmatch(operand):
        number = int(found[1], 16)
    elif _INTEGER.fullmatch(operand):
        number = int(operand.rstrip("U"), 0)
    elif operand == _SHARED:
        number = SHARED_BASE
    elif operand in source.parameters:
        number = PARAMETER_BASE
    else:
        return None
    return np.full(WARP, number % (1 << bits), _unsigned(dtype)).view(dtype)


def _predicate(source: Source, operand: str) -> Reader:
    if _INTEGER.fullmatch(operand):
        constant = np.full(WARP, int(operand) != 0)
        return lambda warp: constant
    name, is_negated = operand.removeprefix("!"), operand.startswith("!")
    if source.registers.get(name) != PREDICATE:
        raise NotModelled(f"predicate {operand}")
    return lambda warp: register(warp, name) ^ is_negated


def writer(source: Source, operand: str) -> Writer:
    """Writes numbers to a register, as they are or extended to its width; `_` takes anything."""
    if operand == "_":
        return lambda warp, numbers: None
    if operand not in source.registers:
        raise NotModelled(f"result {operand}")
    declared = TYPES[source.registers[operand]]
    itemsize = declared.itemsize

    def write(warp: Warp, numbers: Lanes) -> None:
        if numbers.itemsize < itemsize:
            kind = "int" if numbers.dtype.kind == "i" else "uint"
            numbers = numbers.astype(f"{kind}{8 * itemsize}")
        numbers = numbers.view(declared)
        if warp.some is not None and operand in warp.registers:
            numbers = np.where(warp.some, numbers, warp.registers[operand])
        warp.registers[operand] = numbers

    return write


def address(source: Source, operand: str) -> Callable[[Warp], Addresses]:
    """Reads an operand `[register + offset]`."""
    found = _ADDRESS.fullmatch(operand)
    if found is None:
        raise NotModelled(f"address {operand}")
    base, offset = found[1], int(found[2] or 0)
    read = reader(source, base, source.registers.get(base, "b64"))
    return lambda warp: read(warp).astype(np.int64) + offset


def active(instruction: Instruction, source: Source) -> Reader:
    """The threads that execute an instruction."""
    guard = instruction.guard
    read = _predicate(source, "1" if guard is None else "!" * guard.is_negated + guard.predicate)
    return lambda warp: read(warp) & warp.here


def same(numbers: Lanes) -> int:
    """The one number that all threads have."""
    if (numbers != numbers[0]).any():
        raise NotModelled(f"threads of a warp with different operands: {numbers}")
    return int(numbers[0])
