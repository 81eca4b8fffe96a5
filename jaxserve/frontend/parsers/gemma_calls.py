"""Calls of Gemma: `call:f{city:<escape>Paris<escape>,days:3}`, with any of its string markers, and their grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from jaxserve.frontend.parsers.arguments import Arguments, other_name
from jaxserve.frontend.parsers.bodies import MAX_HEADER_CHARS, Place
from jaxserve.frontend.parsers.literals import GEMMA, convert_value
from jaxserve.frontend.parsers.raw_values import branches_of, string_terminal
from jaxserve.frontend.parsers.scanner import SPACE, Reading, Scanner, stops
from jaxserve.frontend.parsers.schema_types import ParameterTypes
from jaxserve.ipc.call_grammar import ANY_TEXT, Either, Json, Member, Members, Terms, Text, without

_MAX_DEPTH: Final = 8
_MAX_OPEN_DEPTH: Final = 2
"""Nesting of values of which a schema says nothing."""
_NAME: Final = "[A-Za-z_][A-Za-z0-9_]*"
_SCALARS: Final = Json({"type": ["number", "boolean", "null"]})
_OF_LISTS: Final = frozenset(("minItems", "maxItems", "prefixItems", "contains"))


@dataclass(frozen=True, slots=True)
class GemmaBody:
    """Calls of Gemma."""

    quote: str
    """The text that a model writes before and after a string."""

    def read(self, scanner: Scanner, place: Place) -> Reading[None]:
        """Read one call."""
        yield from scanner.run(SPACE)
        yield from scanner.expect("call:")
        name = (yield from scanner.text_until(stops("{"), MAX_HEADER_CHARS)).strip()
        place.announce(scanner, name)
        yield from convert_value(scanner, GEMMA)
        scanner.num_calls_read += 1
        yield from scanner.run(SPACE)

    def terms(self, arguments: Arguments) -> Terms:
        """Return the arguments without the braces around them."""
        return self._members(arguments, 0)

    def _members(self, arguments: Arguments, depth: int) -> Terms:
        """Return the members of an object, of which `arguments` has the schema."""
        named = arguments.named
        members = [
            Member((_key(one.name, arguments) + ":", *self._value(one.schema, arguments, depth + 1)), one.count)
            for one in named
        ]
        if arguments.additional is not None:
            key = other_name(_NAME, [one.name for one in named])
            members.append(Member((key, ":", *self._value(arguments.additional, arguments, depth + 1)), "any"))
        return (Members(tuple(members), (",",)),)

    def _value(self, schema: dict[str, Any], arguments: Arguments, depth: int) -> Terms:
        if depth > _MAX_DEPTH:
            raise arguments.unsupported("a schema that is nested so deeply")
        options = [
            option for branch in branches_of(schema, arguments) for option in self._options(branch, arguments, depth)
        ]
        if not options:
            raise arguments.unsupported("a schema that nothing satisfies")
        return options[0] if len(options) == 1 else (Either(tuple(options)),)

    def _options(self, schema: dict[str, Any], arguments: Arguments, depth: int) -> list[Terms]:
        types = ParameterTypes(arguments.root).of_schema(schema)
        if not types:
            return self._open_values(schema, arguments, depth)
        options: list[Terms] = []
        if "string" in types and (text := string_terminal(schema, arguments)) is not None:
            options.append(self._string(text))
        scalars = types & {"integer", "number", "boolean", "null"}
        if scalars and not types <= {"string"} | scalars:
            raise arguments.unsupported("a schema of several types")
        if scalars:
            values = [value for value in schema.get("enum", []) if not isinstance(value, str)]
            kept = {"enum": values} if "enum" in schema else {"type": sorted(scalars)}
            options.append((arguments.json_term({**schema, **kept}),))
        if "array" in types:
            options.append(self._list(schema, arguments, depth))
        if "object" in types:
            inner = Arguments(schema, arguments.param, arguments.root)
            options.append(("{", *self._members(inner, depth), "}"))
        return options

    def _list(self, schema: dict[str, Any], arguments: Arguments, depth: int) -> Terms:
        if _OF_LISTS & schema.keys():
            raise arguments.unsupported(f"{min(_OF_LISTS & schema.keys())} of a list")
        items = schema.get("items", {})
        item = self._value(items if isinstance(items, dict) else {}, arguments, depth + 1)
        return ("[", Members((Member(item, "any"),), (",",)), "]")

    def _open_values(self, schema: dict[str, Any], arguments: Arguments, depth: int) -> list[Terms]:
        """Return values of any type."""
        options: list[Terms] = [self._string(string_terminal(schema, arguments) or ANY_TEXT), (_SCALARS,)]
        if depth <= _MAX_OPEN_DEPTH:
            inner = Arguments({"type": "object"}, arguments.param)
            options.append(("{", *self._members(inner, depth), "}"))
            options.append(self._list({}, arguments, depth))
        return options

    def _string(self, terminal: str) -> Terms:
        return (self.quote, Text(f"({terminal}) & {without(self.quote)}", self.quote))


def _key(name: str, arguments: Arguments) -> str:
    if not name.isidentifier():
        raise arguments.unsupported(f"the name {name!r}")
    return name
