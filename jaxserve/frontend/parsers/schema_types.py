"""JSON types of a function's parameters, for formats in which a model writes values without quotes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from jaxserve.frontend.json_schema import referenced_schema

_TYPES: Final[Mapping[type, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_MAX_SCHEMAS: Final = 256
"""Schemas that are read for one call. Clients write them, and the event loop reads them."""
_MAX_MEMBERS: Final = 128
"""Members of a list that are read."""
_MAX_DEPTH: Final = 32


def type_of(value: Any) -> str:
    """Return the JSON type of a decoded value; `number` is one with a fraction or an exponent."""
    return _TYPES[type(value)]


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that need not be a string.

    Text that is no JSON is a string, and so is JSON of another type than `types` if they include strings.
    """
    stripped = text.strip()
    written = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    as_string = json.dumps(text if "string" in types else stripped, ensure_ascii=False)
    try:
        value = json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return as_string
    is_string = "string" in types and (isinstance(value, str) or type_of(value) not in types)
    return as_string if is_string else written


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class ParameterTypes:
    """The JSON types that a function's schema allows for each of its parameters."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = dict(schema)
        self._known: dict[int, frozenset[str]] = {}
        """Types by the identity of a schema; empty while they are being found, so that a reference to itself says nothing."""

    def of(self, name: str) -> frozenset[str]:
        """Return the types of a parameter, `integer` with each `number`; empty if the schema does not say."""
        objects = [self._root, *_members(self._root.get("allOf"))]
        objects += [referenced_schema(one.get("$ref"), self._root) for one in objects if isinstance(one, dict)]
        return _common(self.of_schema(_property(one, name)) for one in objects if isinstance(one, dict))

    def of_schema(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the types of a value of this schema, in the same way."""
        if not isinstance(schema, dict):
            return frozenset()
        known = self._known.get(id(schema))
        if known is not None:
            return known
        if depth > _MAX_DEPTH or len(self._known) >= _MAX_SCHEMAS:
            return frozenset()
        self._known[id(schema)] = frozenset()
        types = _common(
            [
                _named_types(schema.get("type")),
                frozenset(map(type_of, _members(schema.get("enum")))),
                frozenset([type_of(schema["const"])] if "const" in schema else []),
                self.of_schema(referenced_schema(schema.get("$ref"), self._root), depth + 1),
                *(self.of_schema(part, depth + 1) for part in _members(schema.get("allOf"))),
                *(
                    frozenset().union(*(self.of_schema(part, depth + 1) for part in _members(schema.get(name))))
                    for name in ("anyOf", "oneOf")
                ),
            ]
        )
        self._known[id(schema)] = types
        return types


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a property, or that of additional ones."""
    properties = schema.get("properties")
    return (
        properties[name] if isinstance(properties, dict) and name in properties else schema.get("additionalProperties")
    )


def _named_types(named: Any) -> frozenset[str]:
    names = named if isinstance(named, list) else [named]
    types = frozenset(name for name in names if isinstance(name, str))
    return types | {"integer"} if "number" in types else types


def _common(parts: Iterable[frozenset[str]]) -> frozenset[str]:
    """Return the types that all parts allow, of those that say any."""
    said = [types for types in parts if types]
    return frozenset.intersection(*said) if said else frozenset()


def _members(values: Any) -> list[Any]:
    return values[:_MAX_MEMBERS] if isinstance(values, list) else []
