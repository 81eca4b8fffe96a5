"""`oneOf` whose alternatives exclude each other means what `anyOf` means, which grammars can express."""

from __future__ import annotations

from itertools import combinations
from typing import Any, Final

from jaxserve.frontend.json_schema import child_schemas, referenced_schema

MAX_PAIRS: Final = 1 << 14
"""Pairs of alternatives that are compared for one request: a tenth of a second."""
_MAX_DEPTH: Final = 16
_MAX_TAGS: Final = 16
"""Required properties of which each may be the tag of a union."""
_NAMES: Final = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}


def without_one_of(schema: dict[str, Any], max_pairs: int = MAX_PAIRS) -> dict[str, Any]:
    """Write `anyOf` for each `oneOf` whose alternatives exclude each other, in place, and return the schema.

    An object's alternatives exclude each other if a property that one of them requires does, as `kind` of tagged unions.
    max_pairs: alternatives that are compared with each other. The rest stays `oneOf`, since no grammar counts the alternatives that a text has.
    """
    alternatives = _Alternatives(schema, max_pairs)
    places = [schema]
    while places:
        part = places.pop()
        places += child_schemas(part)
        named = part.get("oneOf")
        if isinstance(named, list) and "anyOf" not in part and alternatives.exclude_each_other(named):
            part["anyOf"] = part.pop("oneOf")
    return schema


class _Alternatives:
    """Comparisons of the alternatives of one schema."""

    def __init__(self, root: dict[str, Any], max_pairs: int) -> None:
        self._root = root
        self._num_left = max_pairs

    def exclude_each_other(self, schemas: list[Any]) -> bool:
        """Return True if it is certain that no value matches two of the schemas."""
        values = [_listed_values(schema) for schema in schemas if isinstance(schema, dict)]
        strings = [value for listed in values for value in listed or [None] if isinstance(value, str)]
        if len(values) == len(schemas) and len(strings) == sum(len(listed or [None]) for listed in values):
            return len(set(strings)) == len(strings)
        return self._are_tagged(schemas) or all(self._are_apart(*pair, 0) for pair in combinations(schemas, 2))

    def _are_tagged(self, schemas: list[Any]) -> bool:
        """Return True if all schemas are objects that require one property, with a text of its own in each of them."""
        found = [schema for each in schemas if (schema := self._resolved(each)) is not None]
        if len(found) < len(schemas) or any(_types(schema) != {"object"} for schema in found):
            return False
        for name in _required(found[0])[:_MAX_TAGS] if found else ():
            tags = [_property(schema, name) for schema in found if name in _required(schema)]
            if len(tags) < len(found) or not all(isinstance(tag, dict) for tag in tags):
                continue
            values = [value for tag in tags for value in _listed_values(tag) or [None]]
            if all(isinstance(value, str) for value in values) and len(set(values)) == len(values):
                return True
        return False

    def _are_apart(self, one: Any, other: Any, depth: int) -> bool:
        self._num_left -= 1
        one, other = self._resolved(one), self._resolved(other)
        if self._num_left < 0 or depth > _MAX_DEPTH or one is None or other is None:
            return False
        types, other_types = _types(one), _types(other)
        if types and other_types and not types & other_types:
            return True
        values, other_values = _listed_values(one), _listed_values(other)
        if values is not None and other_values is not None:
            return not any(value in other_values for value in values)
        for schema, against in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf"):
                inner = schema.get(name)
                if isinstance(inner, list) and all(self._are_apart(each, against, depth + 1) for each in inner):
                    return True
        return types == other_types == {"object"} and self._objects_are_apart(one, other, depth)

    def _objects_are_apart(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        required = dict.fromkeys(name for each in (one, other) for name in _required(each))
        # Tags first: properties with listed values, of which most pairs need one comparison.
        for name in sorted(required, key=lambda name: not (_is_listed(one, name) and _is_listed(other, name))):
            schema, other_schema = _property(one, name), _property(other, name)
            if False in (schema, other_schema) or self._are_apart(schema, other_schema, depth + 1):
                return True
        return False

    def _resolved(self, schema: Any) -> dict[str, Any] | None:
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = referenced_schema(schema["$ref"], self._root)
        return schema if isinstance(schema, dict) and "$ref" not in schema else None


def _required(schema: dict[str, Any]) -> list[str]:
    """Return the names of required properties; none of a malformed list, which the compiler refuses."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:
    """Return the schema of a property; False if there is none."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return False if schema.get("additionalProperties") is False and "patternProperties" not in schema else {}


def _is_listed(schema: dict[str, Any], name: str) -> bool:
    found = _property(schema, name)
    return isinstance(found, dict) and _listed_values(found) is not None


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types of values, all numbers as one; empty if the schema names none."""
    values = _listed_values(schema)
    if values is not None:
        return frozenset(_NAMES.get(type(value), "null") for value in values)
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _listed_values(schema: dict[str, Any]) -> list[Any] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None
