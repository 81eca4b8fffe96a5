"""Converts grammars in llama.cpp's format (GBNF) to Lark's, which llguidance reads.

A GBNF grammar has no lexer: a text fits if any division of it does. Lark's lexer takes the longest terminal that fits, so that
`[a-z ]+ " is "` would match nothing. A small grammar without recursion therefore becomes one terminal, a regular expression. In
all others every terminal is a single character, and alternatives that begin alike share their beginning: each alternative that
could come next is an item of the parser, whose number is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Final, TypeAlias

_NAME: Final = re.compile(r"[\w-]+")
_BLANK: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNT: Final = re.compile(r"[*+?]|\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX: Final = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '"\\[]-'}


_MAX_TERMINAL_CHARS: Final = 10_000
"""Characters of a grammar that becomes one terminal, with each repetition written out: its lexer has states for each of them."""


@dataclass(frozen=True)
class _Class:
    pattern: str


@dataclass(frozen=True)
class _Literal:
    text: str


@dataclass(frozen=True)
class _Reference:
    name: str


@dataclass(frozen=True)
class _Group:
    alternatives: list[list[_Part]]
    count: str = ""
    num_copies: int = 1
    """The number of times its characters occur once the repetition is written out."""


_Part: TypeAlias = "_Class | _Literal | _Reference | _Group"


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in Lark's format. Raises ValueError for one that cannot be read."""
    rules = _Parser(text).rules()
    graph, new = dict[str, list[str]](), ["root"]
    while new:
        name = new.pop()
        if name not in rules:
            raise ValueError(f"rule '{name}' not found")
        if name not in graph:
            graph[name] = list(_references(rules[name]))
            new += graph[name]
    is_terminal = _is_small(rules, graph)
    prefix = "R" if is_terminal else "r"  # Lark's terminals are in capitals
    names = {name: f"{prefix}{index}" for index, name in enumerate(graph)}
    lines = [f"{names[name]}: {_lark(rules[name], names, is_terminal)}\n" for name in graph]
    return f"start: {names['root']}\n" + "".join(lines)


def _references(group: _Group) -> Iterator[str]:
    for part in chain(*group.alternatives):
        if isinstance(part, _Reference):
            yield part.name
        elif isinstance(part, _Group):
            yield from _references(part)


def _is_small(rules: Mapping[str, _Group], graph: Mapping[str, list[str]]) -> bool:
    """Return True if the grammar, with each reference and repetition written out, has few characters."""
    sizes = dict[str, int]()
    try:
        for name in TopologicalSorter(graph).static_order():
            sizes[name] = _num_chars(rules[name], sizes)
    except CycleError:
        return False
    return sizes["root"] <= _MAX_TERMINAL_CHARS


def _num_chars(part: _Part, sizes: Mapping[str, int]) -> int:
    match part:
        case _Class():
            return 1
        case _Literal(text):
            return len(text)
        case _Reference(name):
            return sizes[name]
    return part.num_copies * sum(_num_chars(inner, sizes) for inner in chain(*part.alternatives))


def _lark(group: _Group, names: Mapping[str, str], is_terminal: bool) -> str:
    """Return the alternatives in Lark's format."""

    def terms(part: _Part) -> list[str]:
        match part:
            case _Class(pattern):
                return [pattern]
            case _Literal(text):
                return [json.dumps(text)] if is_terminal else list(map(json.dumps, text))
            case _Reference(name):
                return [names[name]]
        return [f"({_lark(part, names, is_terminal)}){part.count}"]

    sequences = [[term for part in sequence for term in terms(part)] for sequence in group.alternatives]
    return " | ".join(" ".join(sequence or ['""']) for sequence in sequences) if is_terminal else _factored(sequences)


def _factored(sequences: list[list[str]]) -> str:
    """Return alternatives of which no two begin with the same term."""
    groups = dict[str, list[list[str]]]()
    for sequence in sequences:
        groups.setdefault(sequence[0] if sequence else '""', []).append(sequence)
    return " | ".join(map(_with_shared_start, groups.values()))


def _with_shared_start(sequences: list[list[str]]) -> str:
    """Return alternatives that begin with the same term."""
    first = sequences[0]
    if all(sequence == first for sequence in sequences):
        return " ".join(first or ['""'])
    columns = enumerate(zip(*sequences, strict=False))
    length = next((i for i, terms in columns if len(set(terms)) > 1), min(map(len, sequences)))
    return f"{' '.join(first[:length])} ({_factored([sequence[length:] for sequence in sequences])})"


class _Parser:
    """Reads the rules of a grammar. Raises ValueError naming the line."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def rules(self) -> dict[str, _Group]:
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

    def _alternatives(self, *, is_nested: bool) -> _Group:
        found = [self._sequence(is_nested)]
        while self._found("|"):
            self._skip(_BLANK_LINES)
            found.append(self._sequence(is_nested))
        return _Group(found)

    def _sequence(self, is_nested: bool) -> list[_Part]:
        items: list[_Part] = []
        blank = _BLANK_LINES if is_nested else _BLANK
        while self._next:
            if self._next in "*+?{" and items:
                items[-1] = self._repeated(items[-1])
            elif self._found('"'):
                items.append(_Literal(self._literal()))
            elif self._found("["):
                items.append(_Class(self._class()))
            elif self._found("."):
                items.append(_Class("/(?s:.)/"))
            elif self._found("("):
                self._skip(_BLANK_LINES)
                items.append(self._alternatives(is_nested=True))
                if not self._found(")"):
                    raise self._error(")")
            elif _NAME.match(self._next):
                items.append(_Reference(self._take(_NAME, "a name")[0]))
            else:
                break
            self._skip(blank)
        return items

    def _repeated(self, part: _Part) -> _Group:
        match = self._take(_COUNT, "a number of repetitions")
        least, comma, most = match.groups()
        if least is None:
            return _Group([[part]], match[0])
        most = most if comma else least
        return _Group([[part]], f"{{{least},{most}}}", num_copies=int(most or least) or 1)

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
