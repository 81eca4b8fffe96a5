"""Tool calls with one tag per parameter, `<parameter=city>\\nParis\\n</parameter>`, and their grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from jaxserve.frontend.parsers.arguments import Argument, Arguments, other_name
from jaxserve.frontend.parsers.bodies import MAX_HEADER_CHARS, NAME_CHARACTERS, Place
from jaxserve.frontend.parsers.json_value import escaped
from jaxserve.frontend.parsers.raw_values import raw_value
from jaxserve.frontend.parsers.scanner import (
    SPACE,
    MalformedError,
    Reading,
    Scanner,
    show,
    show_but_last_newline,
    stops,
)
from jaxserve.frontend.parsers.schema_types import ParameterTypes, typed_json
from jaxserve.ipc.call_grammar import Either, Member, Members, Terms, Text, without


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFlags:
    """Texts after a parameter's name that say whether its value is a string, in place of the schema."""

    string: str
    json: str
    unknown: str
    """The text of a model that omits the flag: the schema decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedBody:
    """Calls with one tag per parameter: the schema says which values are not strings, unless there are flags."""

    parameter: str
    parameter_name_end: str
    parameter_end: str
    name_end: str = ""
    """Text after the function's name. Empty: the name, a word, ends where a parameter begins or the call ends."""
    value_start: str = ""
    """Text before a value, after white space."""
    flags: TypeFlags | None = None
    has_own_lines: bool = True
    """True if a line break before a value and one after it are not part of it."""
    line: str = ""
    """The line break that the model writes before and after a value."""
    gap: str = "\n"
    """The text that a model writes between tags."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        """Read one call."""
        ends = stops(self.name_end) if self.name_end else stops(self.parameter, *place.closers)
        name = (yield from scanner.text_until(ends, MAX_HEADER_CHARS)).strip()
        if not self.name_end and NAME_CHARACTERS.fullmatch(name) is None:
            raise MalformedError
        scanner.take(len(self.name_end))
        name = place.announce(scanner, name)
        types = ParameterTypes(place.tools.get(name, {}))
        scanner.emit("arguments", "{")
        between = ""
        while True:
            yield from scanner.run(SPACE)
            if not (yield from scanner.accept(self.parameter)):
                break
            key = (yield from scanner.text_until(stops(self.parameter_name_end), MAX_HEADER_CHARS)).strip()
            scanner.take(len(self.parameter_name_end))
            allowed = yield from self._read_flag(scanner, types.of(key))
            if self.value_start:
                yield from scanner.run(SPACE)
                yield from scanner.expect(self.value_start)
            if self.has_own_lines:
                yield from scanner.accept("\n")
            scanner.emit("arguments", f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            yield from self._read_value(scanner, allowed, place.closers)
        scanner.emit("arguments", "}")
        scanner.num_calls_read += 1

    def terms(self, arguments: Arguments) -> Terms:
        """Return the tags of all arguments, in the order of the schema."""
        named = arguments.named
        members = [
            Member((self.parameter, self._name(one, arguments), *self._rest(one, arguments)), one.count)
            for one in named
        ]
        if arguments.additional is not None:
            other = Argument("", arguments.additional, "optional")
            name = other_name(r"[A-Za-z0-9_.-]+", [one.name for one in named])
            members.append(Member((self.parameter, name, *self._rest(other, arguments)), "any"))
        return (Members(tuple(members)),)

    def _read_flag(self, scanner: Scanner, types: frozenset[str]) -> Reading[frozenset[str]]:
        """Return the types that a value may have, by its flag if the format has flags."""
        if self.flags is None:
            return types
        flag = yield from scanner.expect(self.flags.string, self.flags.json, self.flags.unknown)
        if flag == self.flags.string:
            return frozenset({"string"})
        return types if flag == self.flags.unknown or types == {"string"} else _ANY_BUT_TEXT

    def _read_value(self, scanner: Scanner, types: frozenset[str], closers: tuple[str, ...]) -> Reading[None]:
        end = stops(self.parameter_end)
        if types <= {"string"}:
            scanner.emit("arguments", '"')
            shown = show_but_last_newline if self.has_own_lines else show
            yield from scanner.until(end, shown(scanner, "arguments", escaped))
            yield from scanner.expect(self.parameter_end)
            closing = '"'
        else:
            text = yield from scanner.text_until(end)
            yield from scanner.expect(self.parameter_end)
            if types & {"object", "array"} and text.lstrip().startswith(("{", "[")):
                text += yield from self._rest_of_json(scanner, text, closers)
            closing = typed_json(text.removesuffix("\n") if self.has_own_lines else text, types)
        scanner.emit("arguments", closing)

    def _rest_of_json(self, scanner: Scanner, begin: str, closers: tuple[str, ...]) -> Reading[str]:
        """Return what follows `begin` and the end of a parameter, if that end is inside a string of JSON; empty if it is not.

        The value ends in any case where another parameter or the end of the call follows: a stray quote hides neither.
        """
        pieces: list[str] = []
        piece, is_open = begin, False
        while True:
            num_quotes = sum(quote[0] == '"' for quote in _QUOTES.finditer(piece))
            is_open ^= num_quotes % 2 == 1
            if not is_open:
                return "".join(pieces)
            space = yield from scanner.run(SPACE)
            if (yield from scanner.starting(self.parameter, *closers)):
                return "".join(pieces)
            piece = yield from scanner.text_until(stops(self.parameter_end))
            yield from scanner.expect(self.parameter_end)
            pieces.append(self.parameter_end + space + piece)

    def _name(self, argument: Argument, arguments: Arguments) -> str:
        name = argument.name
        is_written = name and name == name.strip() and self.parameter_name_end not in name and "\n" not in name
        if not is_written or len(name) >= MAX_HEADER_CHARS:
            raise arguments.unsupported(f"the name {name!r}")
        return name

    def _rest(self, argument: Argument, arguments: Arguments) -> Terms:
        """Return what follows the name of a parameter."""
        types = ParameterTypes(arguments.schema).of(argument.name) if argument.name else frozenset[str]()
        types = types or ParameterTypes(arguments.root).of_schema(argument.schema)
        flags = self.flags
        value = raw_value(argument.schema, types, arguments, has_flag=flags is not None)
        begin = (self.gap + self.value_start if self.value_start else "") + self.line
        end = self.line + self.parameter_end
        options: list[Terms] = []
        if value.text is not None:
            edges = r" & ~/\n(?s:.*)/ & ~/(?s:.*)\n/" if self.has_own_lines and not self.line else ""
            text = Text(f"({value.text}) & {without(self.parameter_end)}{edges}", end + self.gap)
            options.append((self.parameter_name_end + (flags.string if flags else "") + begin, text))
        if value.json is not None:
            opening = self.parameter_name_end + (flags.json if flags else "") + begin
            options.append((opening, value.json, end + self.gap))
        return options[0] if len(options) == 1 else (Either(tuple(options)),)


_ANY_BUT_TEXT = frozenset({"null", "boolean", "integer", "number", "array", "object"})


_QUOTES = re.compile(r'\\.|"', re.DOTALL)
