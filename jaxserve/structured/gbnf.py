"""Converts grammars in llama.cpp's format (GBNF) to Lark's, which llguidance reads.

A GBNF grammar has no lexer: a text fits if any division of it does. Lark's lexer takes the longest terminal that fits, so that
`[a-z ]+ " is "` would match nothing. A grammar without recursion therefore becomes one terminal, a regular expression. In one
with recursion every terminal is a single character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Final, TypeAlias

_NAME: Final = re.compile(r"[\w-]+")
_BLANK: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNT: Final = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX: Final = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '"\\[]-'}


@dataclass(frozen=True)
class _Literal:
    text: str


@dataclass(frozen=True)
class _Reference:
    name: str


_Part: TypeAlias = str | _Literal | _Reference
"""Lark's text, or a part of which it depends on all rules."""


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in Lark's format. Raises ValueError for one that cannot be read."""
    rules = _Parser(text).rules()
    graph, new = dict[str, list[str]](), ["root"]
    while new:
        name = new.pop()
        if name not in rules:
            raise ValueError(f"rule '{name}' not found")
        if name not in graph:
            graph[name] = [part.name for part in rules[name] if isinstance(part, _Reference)]
            new += graph[name]
    try:
        TopologicalSorter(graph).prepare()
        is_recursive = False
    except CycleError:
        is_recursive = True
    prefix = "r" if is_recursive else "R"  # Lark's terminals are in capitals
    names = {name: f"{prefix}{index}" for index, name in enumerate(graph)}
    lines = [f"{names[name]}: {_lark(rules[name], names, is_recursive)}\n" for name in graph]
    return f"start: {names['root']}\n" + "".join(lines)


def _lark(parts: list[_Part], names: Mapping[str, str], is_recursive: bool) -> str:
    """Return the right side of a rule."""
    found: list[str] = []
    for part in parts:
        match part:
            case _Literal(text):
                found += map(json.dumps, text if is_recursive and text else [text])
            case _Reference(name):
                found.append(names[name])
            case _:
                found.append(part)
    return " ".join(found)


class _Parser:
    """Reads the rules of a grammar. Raises ValueError naming the line."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def rules(self) -> dict[str, list[_Part]]:
        """Return the right side of each rule by its name."""
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

    def _alternatives(self, *, is_nested: bool) -> list[_Part]:
        parts = self._sequence(is_nested)
        while self._found("|"):
            self._skip(_BLANK_LINES)
            parts += ["|", *self._sequence(is_nested)]
        return parts

    def _sequence(self, is_nested: bool) -> list[_Part]:
        items: list[list[_Part]] = []
        blank = _BLANK_LINES if is_nested else _BLANK
        while self._next:
            if self._next in "*+?{" and items:
                items[-1] = ["(", *items[-1], ")" + self._count()]
            elif self._found('"'):
                items.append([_Literal(self._literal())])
            elif self._found("["):
                items.append([self._class()])
            elif self._found("."):
                items.append(["/(?s:.)/"])
            elif self._found("("):
                self._skip(_BLANK_LINES)
                items.append(["(", *self._alternatives(is_nested=True), ")"])
                if not self._found(")"):
                    raise self._error(")")
            elif _NAME.match(self._next):
                items.append([_Reference(self._take(_NAME, "a name")[0])])
            else:
                break
            self._skip(blank)
        return [part for item in items for part in item] or [_Literal("")]

    def _count(self) -> str:
        """Return the suffix of a repetition."""
        match = self._take(_COUNT, "a number of repetitions")
        least, comma, most = match.groups()
        return match[0] if least is None else f"{{{least},{most if comma else least}}}"

    def _literal(self) -> str:
        chars = []
        while not self._found('"'):
            chars.append(self._char())
        return "".join(chars)

    def _class(self) -> str:
        """Return a class of characters as a regular expression, whose syntax has operators that GBNF does not have."""
        start = "[^" if self._found("^") else "["
        ranges = []
        while not self._found("]"):
            first = last = self._char()
            if self._next == "-" and not self._text.startswith("-]", self._place):
                self._place += 1
                last = self._char()
            ranges.append(f"{_in_class(first)}-{_in_class(last)}")
        if not ranges and start == "[":
            raise self._error("a character in the class before")
        return f"/{start}{''.join(ranges)}]/" if ranges else "/(?s:.)/"

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
