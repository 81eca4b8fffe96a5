"""Calls of Gemma: `call:f{city:<escape>Paris<escape>,days:3}`, with any of its string markers, and their grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from jaxserve.frontend.parsers.arguments import ANNOTATIONS, Arguments, other_name
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
_MAX_SCHEMAS: Final = 2000
"""Schemas that are written out for one function: each reference and each open value repeats what is in it."""
_ONLY_OF: Final[dict[str, frozenset[str]]] = {
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "string": frozenset("minLength maxLength pattern format".split()),
    "array": frozenset(
        "items prefixItems additionalItems unevaluatedItems contains minContains maxContains minItems maxItems "
        "uniqueItems".split()
    ),
    "object": frozenset(
        "properties required additionalProperties patternProperties propertyNames unevaluatedProperties minProperties "
        "maxProperties dependentRequired dependentSchemas dependencies".split()
    ),
}
"""Keywords that constrain values of one type only."""
_ENFORCED: Final[dict[str | None, frozenset[str]]] = {
    "string": _ONLY_OF["string"] | {"type", "enum", "const", "anyOf", "oneOf", "allOf"},
    "array": frozenset(("type", "items")),
    None: _ONLY_OF["string"],
}
"""Keywords that the terms of values of a type enforce; None: of any type. `Arguments` has those of objects."""
_NAMES: Final = {"string": "a string", "array": "a list", None: "a value of any type"}


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
        return _Values(self.quote).members(arguments, 0)


class _Values:
    """The terms of one function's values."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._num_schemas = 0

    def members(self, arguments: Arguments, depth: int) -> Terms:
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
        schema = {name: value for name, value in schema.items() if not name.startswith("x-")}
        options = [
            option for branch in branches_of(schema, arguments) for option in self._options(branch, arguments, depth)
        ]
        if not options:
            raise arguments.unsupported("a schema that nothing satisfies")
        return options[0] if len(options) == 1 else (Either(tuple(options)),)

    def _options(self, schema: dict[str, Any], arguments: Arguments, depth: int) -> list[Terms]:
        self._num_schemas += 1
        if self._num_schemas > _MAX_SCHEMAS:
            raise arguments.unsupported(f"a schema that, written out, has more than {_MAX_SCHEMAS} others in it")
        types = ParameterTypes(arguments.root).of_schema(schema)
        if not types:
            return self._open_values(_checked(schema, None, arguments), arguments, depth)
        options: list[Terms] = []
        if "string" in types:
            text = string_terminal(_checked(schema, "string", arguments), arguments)
            options += [] if text is None else [self._string(text)]
        scalars = types & {"integer", "number", "boolean", "null"}
        if scalars and not types <= {"string"} | scalars:
            raise arguments.unsupported("a schema of several types")
        if scalars:
            values = [value for value in schema.get("enum", []) if not isinstance(value, str)]
            kept = {"enum": values} if "enum" in schema else {"type": sorted(scalars)}
            options.append((arguments.json_term({**schema, **kept}),))
        if "array" in types:
            options.append(self._list(_checked(schema, "array", arguments), arguments, depth))
        if "object" in types:
            inner = Arguments(_constraints(schema, "object"), arguments.param, arguments.root, arguments.work)
            options.append(("{", *self.members(inner, depth), "}"))
        return options

    def _list(self, schema: dict[str, Any], arguments: Arguments, depth: int) -> Terms:
        items = schema.get("items", True)
        if not isinstance(items, dict) and items is not True:
            raise arguments.unsupported("items of a list that are no schema")
        item = self._value(items if isinstance(items, dict) else {}, arguments, depth + 1)
        return ("[", Members((Member(item, "any"),), (",",)), "]")

    def _open_values(self, schema: dict[str, Any], arguments: Arguments, depth: int) -> list[Terms]:
        """Return values of any type."""
        options: list[Terms] = [self._string(string_terminal(schema, arguments) or ANY_TEXT), (_SCALARS,)]
        if depth <= _MAX_OPEN_DEPTH:
            inner = Arguments({"type": "object"}, arguments.param, work=arguments.work)
            options.append(("{", *self.members(inner, depth), "}"))
            options.append(self._list({}, arguments, depth))
        return options

    def _string(self, terminal: str) -> Terms:
        return (self._quote, Text(f"({terminal}) & {without(self._quote)}", self._quote))


def _checked(schema: dict[str, Any], kind: str | None, arguments: Arguments) -> dict[str, Any]:
    """Return the keywords that constrain values of a type, None being any. Raises UnsupportedParameterError."""
    found = _constraints(schema, kind)
    other = next((name for name in found if name not in _ENFORCED[kind]), None)
    if other is not None:
        raise arguments.unsupported(f"{other} of {_NAMES[kind]}")
    return found


def _constraints(schema: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """Return the keywords of a schema but for annotations and for those of other types only."""
    others = [names for other, names in _ONLY_OF.items() if kind not in (None, other)]
    ignored = ANNOTATIONS.union(*others)
    return {name: value for name, value in schema.items() if name not in ignored and not name.startswith("x-")}


def _key(name: str, arguments: Arguments) -> str:
    if not name.isidentifier():
        raise arguments.unsupported(f"the name {name!r}")
    return name
