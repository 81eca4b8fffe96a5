"""Reads grammars in llama.cpp's format (GBNF) into rules; `gbnf` converts them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Final, TypeAlias

_NAME: Final = re.compile(r"[\w-]+")
_BLANK: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNT: Final = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX: Final = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '"\\[]-'}
ALL_BYTES: Final = (1 << 256) - 1
_NON_ASCII: Final = ALL_BYTES & ~((1 << 128) - 1)


@dataclass(frozen=True, eq=False)
class Class:
    pattern: str
    """A regular expression between slashes."""
    first_bytes: int
    """A bit for each byte with which a character of the class may begin in UTF-8."""


@dataclass(frozen=True, eq=False)
class Literal:
    text: str


@dataclass(frozen=True, eq=False)
class Reference:
    name: str


@dataclass(frozen=True, eq=False)
class Group:
    alternatives: list[list[Part]]
    least: int = 1
    most: int | None = 1
    """The numbers of times that it may occur in a row; None: any number."""

    @property
    def num_copies(self) -> int:
        """The number of times that its characters occur once the repetition is written out."""
        return self.most or self.least or 1


Part: TypeAlias = "Class | Literal | Reference | Group"


def identity(part: Part) -> Hashable:
    """Return what equal literals and equal classes have in common, and a group for itself."""
    match part:
        case Literal(text):
            return Literal, text
        case Class(pattern):
            return Class, pattern
    return part


def read_rules(text: str) -> dict[str, Group]:
    """Return the right side of each rule by its name: none has an alternative or a literal that is empty.

    A rule or a repetition of which one alternative may be left out has the number 0 for `least`. A rule without
    alternatives has no text. Raises ValueError naming the line.
    """
    rules, empty = _Parser(text).rules(), set[str]()
    while True:
        rules = {name: _without_empty_parts(rule, empty) for name, rule in rules.items()}
        found = {name for name, rule in rules.items() if not rule.alternatives}
        if found == empty:
            return rules
        empty = found


def _without_empty_parts(group: Group, empty: Collection[str]) -> Group:
    """Return a group of the same texts. llguidance accepts neither `{0}` nor every `""` in a repetition."""
    if group.most == 0:
        return Group([], 0)
    sequences = [
        [new for part in sequence if (new := _without_empty_part(part, empty)) is not None]
        for sequence in group.alternatives
    ]
    found = [sequence for sequence in sequences if sequence]
    return Group(found, group.least if len(found) == len(sequences) else 0, group.most)


def _without_empty_part(part: Part, empty: Collection[str]) -> Part | None:
    """Return a part of the same texts, or None if the empty text is its only one."""
    match part:
        case Literal(""):
            return None
        case Reference(name) if name in empty:
            return None
        case Group():
            group = _without_empty_parts(part, empty)
            return group if group.alternatives else None
    return part


def nullable_rules(rules: dict[str, Group]) -> set[str]:
    """Return the names of rules that may be empty."""
    found, num_found = set[str](), -1
    while len(found) != num_found:
        num_found = len(found)
        found.update(name for name in reversed(rules) if is_nullable(rules[name], found))
    return found


def is_nullable(part: Part, nullable: Collection[str]) -> bool:
    """Return True if a part may be empty, given the rules that may be."""
    match part:
        case Group(alternatives, least):
            return least == 0 or any(all(is_nullable(inner, nullable) for inner in seq) for seq in alternatives)
        case Reference(name):
            return name in nullable
    return False


class _Parser:
    """Reads the rules of a grammar. Raises ValueError naming the line."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def rules(self) -> dict[str, Group]:
        rules = {}
        self._skip(_BLANK_LINES)
        while self._place < len(self._text):
            name = self._take(_NAME, "the name of a rule")[0]
            self._skip(_BLANK)
            if not self._found("::="):
                raise self._error("::=")
            self._skip(_BLANK_LINES)
            rules[name] = self._alternatives(is_nested=False)
            if self._next not in ("", "\r", "\n"):
                raise self._error("the end of the rule")
            self._skip(_BLANK_LINES)
        return rules

    @property
    def _next(self) -> str:
        return self._text[self._place : self._place + 1]

    def _found(self, text: str) -> bool:
        """Return True if `text` comes next, and skip it."""
        is_next = self._text.startswith(text, self._place)
        if is_next:
            self._place += len(text)
        return is_next

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern, "")

    def _take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self._text, self._place)
        if match is None:
            raise self._error(expected)
        self._place = match.end()
        return match

    def _error(self, expected: str) -> ValueError:
        line = self._text.count("\n", 0, self._place) + 1
        found = self._text[self._place : self._place + 20]
        return ValueError(f"line {line}: expected {expected}, found {json.dumps(found) if found else 'the end'}")

    def _alternatives(self, *, is_nested: bool) -> Group:
        found = [self._sequence(is_nested)]
        while self._found("|"):
            self._skip(_BLANK_LINES)
            found.append(self._sequence(is_nested))
        return Group(found)

    def _sequence(self, is_nested: bool) -> list[Part]:
        items: list[Part] = []
        blank = _BLANK_LINES if is_nested else _BLANK
        while self._next:
            if self._next in "*+?{" and items:
                items[-1] = self._repeated(items[-1])
            elif self._found('"'):
                items.append(Literal(self._literal()))
            elif self._found("["):
                items.append(self._class())
            elif self._found("."):
                items.append(Class("/(?s:.)/", ALL_BYTES))
            elif self._found("("):
                self._skip(_BLANK_LINES)
                items.append(self._alternatives(is_nested=True))
                if not self._found(")"):
                    raise self._error(")")
            elif _NAME.match(self._next):
                items.append(Reference(self._take(_NAME, "a name")[0]))
            else:
                break
            self._skip(blank)
        return items

    def _repeated(self, part: Part) -> Group:
        match = self._take(_COUNT, "a number of repetitions")
        alternatives = part.alternatives if isinstance(part, Group) and part.least == part.most == 1 else [[part]]
        least, comma, most = match.groups()
        if least is None:
            return Group(alternatives, 1 if match[0] == "+" else 0, 1 if match[0] == "?" else None)
        most = most if comma else least
        return Group(alternatives, int(least), int(most) if most else None)

    def _literal(self) -> str:
        chars = []
        while not self._found('"'):
            chars.append(self._char())
        return "".join(chars)

    def _class(self) -> Class:
        """Return a class of characters as a regular expression, whose syntax has operators that GBNF does not have."""
        start = "[^" if self._found("^") else "["
        ranges, first_bytes = [], 0
        while not self._found("]"):
            first = last = self._char()
            if self._next == "-" and not self._text.startswith("-]", self._place):
                self._place += 1
                last = self._char()
            ranges.append(f"{_in_class(first)}-{_in_class(last)}")
            first_bytes |= byte_range(first_byte(first), first_byte(last))
        if not ranges and start == "[":
            raise self._error("a character in the class before")
        if start == "[^":
            first_bytes = ~first_bytes & ALL_BYTES | _NON_ASCII
        return Class(f"/{start}{''.join(ranges)}]/" if ranges else "/(?s:.)/", first_bytes)

    def _char(self) -> str:
        char = self._next
        if not char:
            raise self._error("a character")
        self._place += 1
        if char != "\\":
            return char
        if self._next in _ESCAPES:
            self._place += 1
            return _ESCAPES[self._text[self._place - 1]]
        code = int(self._take(_HEX, "an escape of GBNF after \\")[0][1:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(f"U+{code:04X} is no character")
        return chr(code)


def _in_class(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def first_byte(char: str) -> int:
    return char.encode("utf-8", "surrogatepass")[0]


def byte_range(first: int, last: int) -> int:
    """Return a bit for each byte from the first to the last."""
    return (1 << last + 1) - (1 << first) if last >= first else 0
