"""The arguments of a function, as formats that are no JSON write them one by one, in grammars of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from jaxserve.errors import UnsupportedParameterError, unsupported
from jaxserve.frontend.json_schema import referenced_schema
from jaxserve.ipc.call_grammar import Json, Term, Terms, Text

ANNOTATIONS: Final = frozenset(
    "title description default examples example deprecated readOnly writeOnly $schema $id $comment $defs definitions "
    "strict contentEncoding contentMediaType".split()
)
"""Keywords that constrain no value."""
_OF_OBJECTS: Final = frozenset(("type", "properties", "required", "additionalProperties", "$ref"))
_MAX_REFERENCES: Final = 32


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

    @property
    def root(self) -> dict[str, Any]:
        """Return the schema in which references are looked up."""
        return self.schema if self.outer is None else self.outer

    @property
    def object_schema(self) -> dict[str, Any]:
        """Return the schema that lists the properties. Raises UnsupportedParameterError for one that does more."""
        found = self.resolved(self.schema)
        for name, value in found.items():
            if name not in _OF_OBJECTS | ANNOTATIONS and value not in ([], {}, None):
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

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the schema to which a schema refers, or itself."""
        for _ in range(_MAX_REFERENCES):
            if "$ref" not in schema:
                return schema
            target = referenced_schema(schema["$ref"], self.root)
            if target is None or any(name not in ANNOTATIONS | {"$ref", "type"} for name in schema):
                raise self.unsupported("$ref beside other keywords" if target is not None else f"$ref {schema['$ref']}")
            schema = target
        raise self.unsupported("a $ref that refers to itself")

    def json_term(self, schema: Mapping[str, Any]) -> Term:
        """Return a value in JSON; its schema may refer to definitions of the function's."""
        definitions: dict[str, Any] = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return Json({**schema, **definitions})

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
