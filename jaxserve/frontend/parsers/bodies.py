"""Parsers of tool calls between their markers: one class per syntax, one instance per model family.

A body reads the calls that follow an opener. It emits the name once it is sure of a call. Before that, a MalformedError
turns the text back into content. After that, malformed text ends the call: the arguments read so far stay, and the rest
is content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from jaxserve.frontend.parsers.arguments import Arguments, other_name
from jaxserve.frontend.parsers.json_value import pass_value, read_string
from jaxserve.frontend.parsers.literals import PYTHON, convert_members
from jaxserve.frontend.parsers.raw_values import python_value
from jaxserve.frontend.parsers.scanner import SPACE, MalformedError, Reading, Scanner, show, stops
from jaxserve.ipc.call_grammar import Member, Members, Terms

Tools = Mapping[str, Mapping[str, Any]]
"""The functions that the request offers, with the JSON schemas of their parameters."""

MAX_HEADER_CHARS = 256
"""Longest text around a name; a name itself has at most 64."""


@dataclass(frozen=True, slots=True)
class Place:
    """Context in which a body reads calls."""

    tools: Tools
    closer: str = ""
    """Text that ends the calls; a body does not consume it. Empty: there is none."""
    is_marked: bool = True
    """True if a marker has announced calls. Otherwise only the name of an offered tool makes a call."""

    @property
    def closers(self) -> tuple[str, ...]:
        return (self.closer,) if self.closer else ()

    def announce(self, scanner: Scanner, name: str) -> str:
        """Emit a name and return it; the draft is the text of the call so far. Raises MalformedError if it is no call.

        A name that is written as its own namespace, `f.f`, is that of the function `f`.
        """
        space, _, own = name.partition(".")
        if name not in self.tools and space == own and own in self.tools:
            name = own
        if not name or not (self.is_marked or name in self.tools):
            raise MalformedError
        scanner.emit("name", name)
        return name


class Body(Protocol):
    """One syntax of calls."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        """Read the calls after an opener."""
        ...


@dataclass(frozen=True, slots=True)
class JsonBody:
    """JSON objects with a name and arguments, one, several or a list: `{"name": "f", "arguments": {...}}`."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        yield from scanner.run(_SPACE_OR_OPENING)
        while True:
            yield from _JsonCall(scanner, place).read()
            separator = yield from scanner.run(_BETWEEN_OBJECTS)
            if "]" in separator or (yield from scanner.peek()) != "{":
                return
            scanner.emit("syntax")


_SPACE_OR_OPENING = re.compile(r"[\s\[]*")
_BETWEEN_OBJECTS = re.compile(r"[\s\]},;]*")
_NAME_KEYS = frozenset({"name", "function", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"type", "id", "index", "tool_call_id"})


class _JsonCall:
    """One object of a JsonBody."""

    def __init__(self, scanner: Scanner, place: Place) -> None:
        self._scanner = scanner
        self._place = place
        self._is_named = False
        self._has_arguments = False
        self._early_arguments: str | None = None
        """Arguments that came before the name."""

    def read(self) -> Reading[None]:
        yield from self._scanner.expect("{")
        while True:
            yield from self._scanner.run(SPACE)
            key = yield from read_string(self._scanner)
            yield from self._scanner.run(SPACE)
            yield from self._scanner.expect(":")
            yield from self._scanner.run(SPACE)
            yield from self._read_member(key)
            yield from self._scanner.run(SPACE)
            if not (yield from self._scanner.accept(",")):
                break
        if not self._is_named:
            raise MalformedError
        if not self._has_arguments:
            self._scanner.emit("arguments", "{}")
        self._scanner.num_calls_read += 1

    def _read_member(self, key: str) -> Reading[None]:
        scanner = self._scanner
        if key in _NAME_KEYS and not self._is_named:
            self._place.announce(scanner, (yield from read_string(scanner)))
            self._is_named = True
            if self._early_arguments is not None:
                scanner.emit("arguments", self._early_arguments)
        elif key in _ARGUMENT_KEYS and not self._has_arguments:
            yield from self._read_arguments()
            self._has_arguments = True
        elif key in _OTHER_KEYS or self._is_named:
            yield from pass_value(scanner, self._place.closers, lambda piece: scanner.take(len(piece)))
        else:
            raise MalformedError  # an object that is no call: shown as content at once

    def _read_arguments(self) -> Reading[None]:
        scanner = self._scanner
        first = yield from scanner.peek()
        if first == "{" and self._is_named:
            scanner.emit("syntax")
            yield from pass_value(scanner, self._place.closers, show(scanner, "arguments"))
            return
        if first == '"':  # JSON inside a JSON string
            arguments = yield from read_string(scanner)
        else:
            pieces: list[str] = []
            yield from pass_value(scanner, self._place.closers, lambda piece: pieces.append(scanner.take(len(piece))))
            arguments = "".join(pieces)
        arguments = "{}" if arguments in ("null", "") else arguments
        if self._is_named:
            scanner.emit("arguments", arguments)
        else:
            self._early_arguments = arguments


@dataclass(frozen=True, slots=True)
class KeyedBody:
    """A JSON list of objects with one member, whose key is a name and whose value are arguments: `[{"f": {...}}]`."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        yield from scanner.run(_SPACE_OR_OPENING)
        while True:
            yield from scanner.expect("{")
            yield from scanner.run(SPACE)
            name = yield from read_string(scanner)
            yield from scanner.run(SPACE)
            yield from scanner.expect(":")
            yield from scanner.run(SPACE)
            if (yield from scanner.peek()) != "{":
                raise MalformedError
            place.announce(scanner, name)
            yield from pass_value(scanner, place.closers, show(scanner, "arguments"))
            scanner.num_calls_read += 1
            separator = yield from scanner.run(_BETWEEN_OBJECTS)
            if "]" in separator or (yield from scanner.peek()) != "{":
                return
            scanner.emit("syntax")


@dataclass(frozen=True, slots=True)
class HeaderBody:
    """A name in a header, then its arguments as JSON: `f[ARGS]{...}`. A list of objects is read like a JsonBody."""

    header: re.Pattern[str]
    """Pattern of the text before the arguments; its group `name` is the name."""
    trailer: re.Pattern[str] = SPACE
    """Characters between the arguments and the closer."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        yield from scanner.run(SPACE)
        if (yield from scanner.peek()) in ("[", "{"):
            yield from JsonBody().read(scanner, place)
            return
        header = yield from scanner.text_until(stops("{", *place.closers), MAX_HEADER_CHARS)
        match = self.header.fullmatch(header)
        if match is None:
            raise MalformedError
        place.announce(scanner, match["name"])
        if (yield from scanner.peek()) == "{":
            yield from pass_value(scanner, place.closers, show(scanner, "arguments"))
        else:
            scanner.emit("arguments", "{}")
        scanner.num_calls_read += 1
        yield from scanner.run(self.trailer)


@dataclass(frozen=True, slots=True)
class PythonBody:
    """Calls of Python functions with literals for arguments: `[f(city="Paris", days=3), g()]`."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        opening = yield from scanner.run(_SPACE_OR_OPENING)
        first = yield from scanner.peek()
        if not (place.is_marked or "[" in opening) or not (first and NAME_CHARACTERS.fullmatch(first)):
            raise MalformedError
        while True:
            name = yield from scanner.run(NAME_CHARACTERS)
            yield from scanner.expect("(")
            yield from scanner.run(SPACE)
            first = yield from scanner.peek()
            if first != ")" and not first.isidentifier():
                raise MalformedError  # a positional argument cannot become JSON
            place.announce(scanner, name)
            yield from convert_members(scanner, PYTHON, "=", ")")
            scanner.num_calls_read += 1
            separator = yield from scanner.run(_BETWEEN_CALLS)
            if "]" in separator or not (yield from scanner.peek()).isidentifier():
                return
            scanner.emit("syntax")

    def terms(self, arguments: Arguments) -> Terms:
        """Return the arguments as keywords; a value of its own that is true, false or null has Python's word."""
        members = [
            Member((f"{_python_name(one.name, arguments)}=", python_value(one.schema, arguments)), one.count)
            for one in arguments.named
        ]
        if arguments.additional is not None:
            names = [one.name for one in arguments.named]
            members.append(
                Member((other_name(_PYTHON_NAME, names), "=", python_value(arguments.additional, arguments)), "any")
            )
        return (Members(tuple(members), (", ",)),)


_PYTHON_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_IS_PYTHON_NAME = re.compile(r"[^\W\d][\w.-]*")


def _python_name(name: str, arguments: Arguments) -> str:
    if _IS_PYTHON_NAME.fullmatch(name) is None:
        raise arguments.unsupported(f"the name {name!r}")
    return name


NAME_CHARACTERS = re.compile(r"[\w.-]*")
_BETWEEN_CALLS = re.compile(r"[\s\],;]*")
