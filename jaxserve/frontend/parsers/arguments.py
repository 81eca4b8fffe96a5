"""The arguments of a function, as formats that are no JSON write them one by one, in grammars of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol
from urllib.parse import unquote

from jaxserve.errors import UnsupportedParameterError, invalid, unsupported
from jaxserve.frontend.json_schema import referenced_schema
from jaxserve.ipc.call_grammar import Json, Term, Terms, Text

ANNOTATIONS: Final = frozenset(
    "title description default examples example deprecated readOnly writeOnly $schema $id $comment $defs definitions "
    "strict nullable contentEncoding contentMediaType".split()
)
"""Keywords that constrain no value."""
_OF_OBJECTS: Final = frozenset(("type", "properties", "required", "additionalProperties", "$ref"))
_MAX_REFERENCES: Final = 32
_MAX_WORK: Final = 1 << 18
"""Characters and parts of schemas that are read and written for the arguments of one function: a multiple of what its grammar may have.
References can name a part again and again."""
_PART: Final = 64
"""Work of reading one part."""
_DEFINITION: Final = re.compile(r"#/(\$defs|definitions)/([^/]+)")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_KINDS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "properties": ("an object", lambda value: isinstance(value, dict)),
    "required": ("a list of names", _is_strings),
    "type": ("a type or a list of types", lambda value: isinstance(value, str) or _is_strings(value)),
    **{name: ("a list", lambda value: isinstance(value, list)) for name in ("enum", "anyOf", "oneOf", "allOf")},
    **{name: ("a string", lambda value: isinstance(value, str)) for name in ("pattern", "format", "$ref")},
    **dict.fromkeys(("minLength", "maxLength"), ("a number of characters", _is_count)),
}
"""Values of the keywords that are read here."""


class Work:
    """The work that is left for the arguments of one function."""

    def __init__(self) -> None:
        self.left = _MAX_WORK


class ArgumentSyntax(Protocol):
    """A way to write arguments."""

    def terms(self, arguments: Arguments) -> Terms:
        """Return the terms of all arguments. Raises UnsupportedParameterError for what no grammar of the format expresses."""
        ...


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """All arguments are one JSON object."""

    def terms(self, arguments: Arguments) -> Terms:
        """Return the object."""
        return (Json(arguments.schema),)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument."""

    name: str
    schema: dict[str, Any]
    count: Literal["one", "optional"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The schema of a function's arguments, an object."""

    schema: dict[str, Any]
    param: str
    """The path of the field that has the schema."""
    outer: dict[str, Any] | None = None
    """The schema that this one is part of; None: it is none."""
    work: Work = field(default_factory=Work, compare=False)

    def spend(self, amount: int) -> None:
        """Count work. Raises UnsupportedParameterError if it was too much."""
        self.work.left -= amount
        if self.work.left < 0:
            raise self.unsupported("a schema with so many parts")

    @property
    def root(self) -> dict[str, Any]:
        """Return the schema in which references are looked up."""
        return self.schema if self.outer is None else self.outer

    @property
    def object_schema(self) -> dict[str, Any]:
        """Return the schema that lists the properties. Raises UnsupportedParameterError for one that does more."""
        found = self.resolved(self.schema)
        for name, value in found.items():
            has_effect = value not in ([], {}, None) and (name, value) != ("minProperties", 0)
            if name not in _OF_OBJECTS | ANNOTATIONS and has_effect and not name.startswith("x-"):
                raise self.unsupported(f"{name} of the whole object")
        return found

    @property
    def named(self) -> list[Argument]:
        """Return the arguments that the schema names, in its order."""
        found = self.object_schema
        properties, required = found.get("properties") or {}, found.get("required") or []
        names = [*properties, *(name for name in required if name not in properties)]
        if self.additional is None and len(names) > len(properties):
            raise self.unsupported("required of a name that properties do not have")
        schemas = [properties.get(name, self.additional) for name in names]
        return [
            Argument(name, _as_object(schema), "one" if name in required else "optional")
            for name, schema in zip(names, schemas, strict=True)
        ]

    @property
    def additional(self) -> dict[str, Any] | None:
        """Return the schema of arguments that it does not name; None if there may be none."""
        found = self.object_schema.get("additionalProperties", True)
        return None if found is False else _as_object(found)

    def resolved(self, schema: Any) -> dict[str, Any]:
        """Return the schema to which a schema refers, or itself. Raises InvalidRequestError for keywords of a wrong type."""
        found = _as_object(schema)
        for _ in range(_MAX_REFERENCES):
            self.spend(_PART)
            for name in found.keys() & _KINDS.keys():
                expected, is_right = _KINDS[name]
                if not is_right(found[name]):
                    raise invalid(self.param, f"{name}: expected {expected}")
            if "$ref" not in found:
                return found
            target = referenced_schema(found["$ref"], self.root)
            if target is None or any(name not in ANNOTATIONS | {"$ref", "type"} for name in found):
                raise self.unsupported("$ref beside other keywords" if target is not None else f"$ref {found['$ref']}")
            found = target
        raise self.unsupported("a $ref that refers to itself")

    def json_term(self, schema: Mapping[str, Any]) -> Term:
        """Return a value in JSON; its schema may refer to definitions of the function's."""
        return Json({**schema, **self._definitions(schema)})

    def _definitions(self, schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the definitions to which a schema refers, and those to which these refer, by the keyword that lists them."""
        found: dict[str, dict[str, Any]] = {}
        places: list[Any] = [schema]
        while places:
            part = places.pop()
            self.spend(len(part) if isinstance(part, str) else 8)
            if isinstance(part, list):
                places += part
            if not isinstance(part, dict):
                continue
            places += part.values()
            if isinstance(reference := part.get("$ref"), str):
                place = _DEFINITION.match(unquote(reference))
                target = referenced_schema(place[0], self.root) if place is not None else None
                if place is None or target is None:
                    raise self.unsupported(f"$ref {reference}")
                name = place[2].replace("~1", "/").replace("~0", "~")
                if name not in found.setdefault(place[1], {}):
                    found[place[1]][name] = target
                    places.append(target)
        return found

    def unsupported(self, construct: str) -> UnsupportedParameterError:
        """Return the error for a construct that grammars of this format do not express."""
        return unsupported(
            self.param,
            f"is not supported: {construct} cannot be enforced in the format in which this model writes calls; "
            "--tool-call-parser generic takes it",
        )


def _as_object(schema: Any) -> dict[str, Any]:
    """Return a schema that may be a boolean as an object."""
    if isinstance(schema, dict):
        return schema
    return {} if schema is True or schema is None else {"not": {}}


def other_name(pattern: str, names: Sequence[str]) -> Text:
    """Return the names that match `pattern`, but for those that have a meaning of their own."""
    excluded = " | ".join(json.dumps(name, ensure_ascii=False) for name in names)
    return Text(f"/{pattern}/ & ~({excluded})" if names else f"/{pattern}/")
