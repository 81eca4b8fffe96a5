"""PTX text as instructions, with the names of their inline assembly made unique.

Read are the parts of the language that the compiler of Pallas' kernels writes: one entry, declarations of registers,
labels, nested scopes, instructions with a guard. Everything is kept as text: the modules that execute an instruction
decide its meaning, and if it is known at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.ptx.hazards import NotModelled

PREDICATE = "pred"


@dataclass(frozen=True)
class Guard:
    """Instructions are executed by the threads whose predicate is set, or is not."""

    predicate: str
    is_negated: bool


@dataclass(frozen=True)
class Instruction:
    """One of a program."""

    line: int
    opcode: str
    operands: tuple[str, ...]
    guard: Guard | None

    def __str__(self) -> str:
        return f"line {self.line}: {self.opcode} {', '.join(self.operands)}"


@dataclass
class Source:
    """A kernel's text, taken apart."""

    parameters: list[str]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Number of the instruction at each label."""
    registers: dict[str, str] = field(default_factory=dict)
    """Their declared types: `b32`, `pred`."""


_WITHOUT_MEANING = re.compile(r"\.(loc|pragma|shared)\s")
"""Directives: of the source, of the assembler's work, and the one block of shared memory, whose size the launch says."""
_LABEL = re.compile(r"([\w$@]+):(?!:)")
_GUARD = re.compile(r"@(!?)(%?[\w@]+)\s+")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*)")
_PARAMETER = re.compile(r"\.param\s[^,)]*?([\w$]+)(?:\[\d+\])?\s*[,)\n]")


def parse(text: str) -> Source:
    """The one kernel of a module."""
    text = re.sub(r"//[^\n]*", "", text)
    start = text.index("\n{")
    source = Source(_PARAMETER.findall(text[:start]))
    _Reader(source, text).scope(start + 2, _end_of_scope(text, start + 1))
    return source


@dataclass
class _Reader:
    """One pass over the text; `place` is where a statement begins."""

    source: Source
    text: str
    num_scopes: int = 0

    def scope(self, place: int, end: int) -> None:
        """All statements of text[place:end]."""
        while place < end:
            rest = self.text[place]
            if rest.isspace() or rest == ";":
                place += 1
            elif rest == "{":
                place = self._inner(place)
            elif rest == ".":
                place = self._directive(place)
            elif label := _LABEL.match(self.text, place):
                self.source.labels[label[1]] = len(self.source.instructions)
                place = label.end()
            else:
                place = self._instruction(place)

    def _inner(self, place: int) -> int:
        """A nested scope, whose registers and labels are its own."""
        end = _end_of_scope(self.text, place)
        body = self.text[place + 1 : end]
        self.num_scopes += 1
        names = _LABEL.findall(body)
        for type_name, declared in _REGISTERS.findall(body):
            names += _names(declared)
            self.source.registers.update({f"{name}@{self.num_scopes}": type_name for name in _names(declared)})
        own = _REGISTERS.sub(lambda found: "\n" * found[0].count("\n"), body)
        for name in names:
            own = re.sub(rf"(?<![\w.%$]){re.escape(name)}(?![\w.])", f"{name}@{self.num_scopes}", own)
        inner = _Reader(self.source, "\n" * self.text.count("\n", 0, place) + own, self.num_scopes)
        inner.scope(0, len(inner.text))
        self.num_scopes = inner.num_scopes
        return end + 1

    def _directive(self, place: int) -> int:
        registers = _REGISTERS.match(self.text, place)
        if registers is not None:
            self.source.registers.update(dict.fromkeys(_names(registers[2]), registers[1]))
            return registers.end()
        line = self.text[place : self.text.index("\n", place)]
        if _WITHOUT_MEANING.match(line) is None:
            raise NotModelled(f"directive {line}")
        return place + len(line)

    def _instruction(self, place: int) -> int:
        end = self.text.index(";", place)
        line = self.text.count("\n", 0, place) + 1
        statement = self.text[place:end].strip()
        guard = _GUARD.match(statement)
        if guard is not None:
            statement = statement[guard.end() :]
        opcode, *rest = statement.split(None, 1)
        condition = None if guard is None else Guard(guard[2], is_negated=bool(guard[1]))
        self.source.instructions.append(Instruction(line, opcode, _split("".join(rest)), condition))
        return end


def _end_of_scope(text: str, place: int) -> int:
    """Return the place of the brace that closes the one at `place`."""
    depth = 0
    for brace in re.finditer(r"[{}]", text[place:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return place + brace.start()
    raise NotModelled("a scope that does not end")


def _names(declared: str) -> list[str]:
    """`%r<3>, p` declares %r0, %r1, %r2 and p."""
    names = []
    for each in declared.split(","):
        prefix, bracket, count = each.strip().rstrip(">").partition("<")
        names += [f"{prefix}{i}" for i in range(int(count))] if bracket else [prefix]
    return names


def _split(operands: str) -> tuple[str, ...]:
    """At commas that stand in no bracket."""
    found, depth = [""], 0
    for character in operands:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return tuple(each.strip() for each in found if each.strip())


def elements(operand: str) -> list[str]:
    """Return the elements of a vector `{a, b}`, or the single one of a scalar."""
    return [each.strip() for each in operand.strip("{}").split(",")]
