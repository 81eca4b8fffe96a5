"""Reads from a compiled program's text what each of its launches reads from the device's memory and writes to it.

The rules: an operand is read whole, a result is written whole, once for each launch; what is in VMEM (memory space 1 of
TPUs) costs nothing. Arrays of which a launch needs only a part (pages, states, the weights of experts) are named by
their dimensions, with the bytes that count. A loop costs what its body does, as often as the caller says, a condition what
the branch does that the caller names. Caches below the device's memory are not modelled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "s32": 4, "u32": 4, "f32": 4}
_BITS = {"s4": 4, "u4": 4} | {name: 8 * size for name, size in _BYTES.items()}
_SHAPE = re.compile(r"\b(" + "|".join(_BITS) + r")\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(?:, |$)")
_SAME = ("bitcast", "get-tuple-element", "optimization-barrier")
"""Instructions whose result is their operand, or a part of it."""
_FREE = ("parameter", "constant", "tuple", "after-all", "partition-id", "iota", "broadcast", *_SAME)
_COPIES = ("copy-start", "slice-start")

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One instruction of the program's outermost level, or a whole loop."""

    name: str
    opcode: str
    scope: str
    """Scope in the model's code, such as `layer_1/mlp/mul`; its neighbour's if the compiler lost it."""
    read_bytes: float
    written_bytes: float

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True)
class Partial:
    """The bytes that count of each array with these dimensions, which a launch reads or writes in part.

    A fusion with such a result and such an operand updates it in place: the operand is not read. A kernel reads what it updates.
    """

    counted: Mapping[Dims, float]
    """By dimensions without those of size 1."""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a step through its loops and conditions, by a part of their scopes."""

    trips: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Rounds of a loop and of the loops in it; a loop that is not listed goes round once."""
    branches: Mapping[str, int] = field(default_factory=dict)
    """The branch that a condition takes; one that is not listed costs nothing."""


def launches(text: str, partial: Partial, course: Course, computation: str = "") -> list[Launch]:
    """Return the launches of a compiled program, or of one computation of it."""
    sizes: dict[str, float] = {}
    shapes: dict[str, list[Dims]] = {}
    found: list[Launch] = []
    for line in _lines(text, computation):
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, opcode, inside = match.groups()
        operands = [each for each in dict.fromkeys(re.findall(r"%([\w.-]+)", inside)) if each in sizes]
        arrays = list(_arrays(shape, partial))
        sizes[name], shapes[name] = sum(size for _, size in arrays), [dims for dims, _ in arrays]
        if opcode in _SAME and len(operands) == 1 and opcode == "bitcast":
            sizes[name], shapes[name] = sizes[operands[0]], shapes[operands[0]]
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            continue
        label = re.search(r'op_name="(?:jit\(step\)/)?([^"]*)"', line)
        scope = label.group(1) if label else ""
        if found and (not scope or scope.startswith(("params[", "jit("))):  # copies of weights, and kernels
            scope = found[-1].scope
        if opcode == "while":
            read, written = _loop(text, line, scope, partial, course)
        elif opcode == "conditional":
            read, written = _branch(text, line, scope, partial, course)
        elif opcode in _COPIES:  # the result is a pair with the operand
            first, second, *_ = _SHAPE.finditer(shape)
            target = second if opcode == "slice-start" else first
            read, written = _logical(target), 0.0 if "S(" in (target.group(3) or "") else _logical(target)
            read = 0.0 if all(sizes[each] == 0 for each in operands) else read
        else:
            updated = set() if opcode == "custom-call" else set(shapes[name]) & set(partial.counted)
            read = sum(sizes[each] for each in operands if not updated & set(shapes[each]))
            written = sizes[name]
        found.append(Launch(name, opcode, scope, read, written))
    return found


def _loop(text: str, line: str, scope: str, partial: Partial, course: Course) -> tuple[float, float]:
    """Return what all rounds of a loop read and write."""
    rounds, *inner = next((list(count) for part, count in course.trips.items() if part in scope), [1])
    body = re.search(r"body=%([\w.-]+)", line)
    assert body is not None, "a loop has a body"
    within = {**course.trips, **{part: inner for part in course.trips if part in scope and inner}}
    once = launches(text, partial, replace(course, trips=within), body.group(1))
    return rounds * sum(each.read_bytes for each in once), rounds * sum(each.written_bytes for each in once)


def _branch(text: str, line: str, scope: str, partial: Partial, course: Course) -> tuple[float, float]:
    """Return what the branch that is taken reads and writes."""
    number = next((number for part, number in course.branches.items() if part in scope), None)
    names = re.search(r"branch_computations=\{(.*?)\}", line)
    if number is None or names is None:
        return 0.0, 0.0
    found = launches(text, partial, course, re.findall(r"%([\w.-]+)", names.group(1))[number])
    return sum(each.read_bytes for each in found), sum(each.written_bytes for each in found)


def _lines(text: str, computation: str) -> Iterator[str]:
    start = text.index(f"\n%{computation} (" if computation else "\nENTRY ") + 1
    for line in text[start : text.index("\n}", start)].splitlines()[1:]:
        yield re.sub(r"/\*.*?\*/", "", line)


def _arrays(shape: str, partial: Partial) -> Iterator[tuple[Dims, float]]:
    for each in _SHAPE.finditer(shape):
        dims = _dims(each)
        in_vmem = "S(" in (each.group(3) or "")
        yield dims, 0.0 if in_vmem else partial.counted.get(dims, _logical(each))


def _dims(shape: re.Match[str]) -> Dims:
    """Return the dimensions without those of size 1, which compilers drop and add."""
    return tuple(int(size) for size in shape.group(2).split(",") if size and size != "1")


def _logical(shape: re.Match[str]) -> float:
    """Return the bytes of an array without the padding of its layout."""
    return _BITS[shape.group(1)] * math.prod(_dims(shape)) / 8
