"""Parsers of tool calls between their markers: one class per syntax, one instance per model family.

A body reads the calls that follow an opener. It emits the name once it is sure of a call. Before that, a MalformedError
turns the text back into content. After that, malformed text ends the call: the arguments read so far stay, and the rest
is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxserve.frontend.parsers.json_value import escaped, pass_value, read_string
from jaxserve.frontend.parsers.literals import GEMMA, PYTHON, convert_members, convert_value
from jaxserve.frontend.parsers.scanner import (
    SPACE,
    MalformedError,
    Reading,
    Scanner,
    show,
    show_but_last_newline,
    stops,
)
from jaxserve.frontend.parsers.schema_types import ParameterTypes, type_of

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

    def announce(self, scanner: Scanner, name: str) -> None:
        """Emit a name; the draft is the text of the call so far. Raises MalformedError if it is no call."""
        if not name or not (self.is_marked or name in self.tools):
            raise MalformedError
        scanner.emit("name", name)


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
            yield from scanner.run(_BETWEEN_OBJECTS)
            if (yield from scanner.peek()) != "{":
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedBody:
    """One tag per parameter, `<parameter=city>\\nParis\\n</parameter>`: the schema says which values are not strings."""

    parameter: str
    parameter_name_end: str
    parameter_end: str
    name_end: str = ""
    """Text after the function's name. Empty: the name, a word, ends where a parameter begins or the call ends."""
    value_start: str = ""
    """Text before a value, after white space."""
    has_own_lines: bool = True
    """True if a line break before a value and one after it are not part of it."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        ends = stops(self.name_end) if self.name_end else stops(self.parameter, *place.closers)
        name = (yield from scanner.text_until(ends, MAX_HEADER_CHARS)).strip()
        if not self.name_end and _NAME_CHARACTERS.fullmatch(name) is None:
            raise MalformedError
        scanner.take(len(self.name_end))
        place.announce(scanner, name)
        types = ParameterTypes(place.tools.get(name, {}))
        scanner.emit("arguments", "{")
        between = ""
        while True:
            yield from scanner.run(SPACE)
            if not (yield from scanner.accept(self.parameter)):
                break
            key = (yield from scanner.text_until(stops(self.parameter_name_end), MAX_HEADER_CHARS)).strip()
            scanner.take(len(self.parameter_name_end))
            if self.value_start:
                yield from scanner.run(SPACE)
                yield from scanner.expect(self.value_start)
            if self.has_own_lines:
                yield from scanner.accept("\n")
            scanner.emit("arguments", f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            yield from self._read_value(scanner, types.of(key))
        scanner.emit("arguments", "}")
        scanner.num_calls_read += 1

    def _read_value(self, scanner: Scanner, types: frozenset[str]) -> Reading[None]:
        end = stops(self.parameter_end)
        if types <= {"string"}:
            scanner.emit("arguments", '"')
            shown = show_but_last_newline if self.has_own_lines else show
            yield from scanner.until(end, shown(scanner, "arguments", escaped))
            closing = '"'
        else:
            text = yield from scanner.text_until(end)
            closing = _typed_json(text.removesuffix("\n") if self.has_own_lines else text, types)
        yield from scanner.expect(self.parameter_end)
        scanner.emit("arguments", closing)


def _typed_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that need not be a string.

    Text that is no JSON is a string, and so is JSON of another type than `types` if they include strings.
    """
    stripped = text.strip()
    written = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    as_string = json.dumps(text if "string" in types else stripped, ensure_ascii=False)
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return as_string
    is_string = "string" in types and (isinstance(value, str) or type_of(value) not in types)
    return as_string if is_string else written


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True, slots=True)
class PythonBody:
    """Calls of Python functions with literals for arguments: `[f(city="Paris", days=3), g()]`."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        opening = yield from scanner.run(_SPACE_OR_OPENING)
        if not (place.is_marked or "[" in opening) or not (yield from scanner.peek()).isidentifier():
            raise MalformedError
        while True:
            name = yield from scanner.run(_NAME_CHARACTERS)
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


_NAME_CHARACTERS = re.compile(r"[\w.-]*")
_BETWEEN_CALLS = re.compile(r"[\s\],;]*")


@dataclass(frozen=True, slots=True)
class GemmaBody:
    """Calls of Gemma: `call:f{city:<escape>Paris<escape>,days:3}`, with any of its string markers."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        yield from scanner.run(SPACE)
        yield from scanner.expect("call:")
        name = (yield from scanner.text_until(stops("{"), MAX_HEADER_CHARS)).strip()
        place.announce(scanner, name)
        yield from convert_value(scanner, GEMMA)
        scanner.num_calls_read += 1
        yield from scanner.run(SPACE)
