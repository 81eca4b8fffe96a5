"""The schema that clients mean: they write less than the grammar compiler needs, or other words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from jaxserve.errors import invalid
from jaxserve.frontend.checks import shorten

_COMBINING: Final = ("allOf", "anyOf", "oneOf")
"""Lists of schemas for the same value as the schema that has them."""
_LISTS: Final = (*_COMBINING, "prefixItems", "items")
_MAPPINGS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE: Final = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_FORMATS: Final = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex".split()
)
"""The formats of JSON Schema (2020-12, validation, section 7.3). Others are annotations."""
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_LARGEST: Final = (1 << 63) - 1024
"""Numbers are compared with bounds as far as this: it is the largest one of 64 bits that is a float, too."""
_OPEN: Final = 10**17
"""The grammar compiler takes larger bounds only beside one on the other side."""
_EXACT: Final = 1 << 53
"""Integers as far as this are floats of 64 bits, with which the grammar compiler writes values."""
_MOST_COUNTS: Final = ("maxLength", "maxItems", "maxProperties")
_LARGEST_COUNT: Final = (1 << 32) - 1
"""The grammar compiler reads no larger one. No context holds as much."""
_CLASS: Final = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)(\]?)", re.DOTALL)
"""An escape, or a class of characters: its `^`, its body and its end, without which it reaches to the end of the pattern."""
_RANGE: Final = re.compile(r"(\\[pP]\{[^}]{0,99}\}|\\.|.)(?:-(\\[pP]\{[^}]{0,99}\}|\\.|.))?", re.DOTALL)
_SETS: Final = tuple(f"\\{letter}" for letter in "dDsSwWpP")
"""Beginnings of escapes for more than one character: beside them, `-` is itself."""
_UNIQUE: Final = (
    "uniqueItems: nothing can keep a model from repeating an item. Remove uniqueItems from the schema (in pydantic: a "
    "list instead of a set) and drop repeated items from the reply"
)


def intended_schema(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the schema to enforce: closed objects, without formats that are annotations, with bounds of 64 bits, and with
    patterns that Rust reads as ECMA-262 does.

    An object schema that lists `properties` and says nothing of others allows no others, as users, OpenAI's strict mode
    and other engines understand it; `"additionalProperties": true` keeps it open. A schema that is combined with others
    for the same object (`allOf`, `properties` beside `$ref`) stays as JSON Schema defines it, since closing each part
    would exclude the properties of the rest. Raises InvalidRequestError for `uniqueItems`, for bounds that only huge
    numbers satisfy, and for listed values with integers that the compiler would round.
    """
    return _rewritten(schema, _combined(schema), param)


def _rewritten(schema: dict[str, Any], combined: frozenset[int], param: str) -> dict[str, Any]:
    def of(value: Any) -> Any:
        return _rewritten(value, combined, param) if isinstance(value, dict) else value

    result: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "patternProperties" and isinstance(value, dict):
            result[name] = {_rust_pattern(key): of(child) for key, child in value.items()}
        elif name in _MAPPINGS and isinstance(value, dict):
            result[name] = {key: of(child) for key, child in value.items()}
        elif name in _LISTS and isinstance(value, list):
            result[name] = [of(child) for child in value]
        elif name in _SINGLE:
            result[name] = of(value)
        elif name == "pattern" and isinstance(value, str):
            result[name] = _rust_pattern(value)
        elif name in ("const", "enum"):
            result[name] = _exact(name, value, param)
        elif _has_no_effect(name, value):
            continue
        elif name == "uniqueItems" and isinstance(value, bool):
            if value and not _has_few_items(schema):
                raise invalid(param, _UNIQUE)
        else:
            result[name] = value
    result |= _with_bounds(schema, param)
    if id(schema) not in combined and _lists_all(schema):
        result["additionalProperties"] = False
    return result


def _with_bounds(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the bounds of a schema for numbers, in numbers of 64 bits. Raises InvalidRequestError if none is left."""
    found: dict[str, Any] = {}
    for sign, names, (other, *_) in ((-1, _LOWER, _UPPER), (1, _UPPER, _LOWER)):
        for name in names:
            value = schema.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if sign * value <= -_LARGEST:
                raise invalid(
                    param, f"{name}: no number of 64 bits is beyond {shorten(value)}, and others cannot be enforced"
                )
            found[name] = _inward(sign * min(sign * value, _LARGEST), sign)
            if sign * value <= -_OPEN:
                found.setdefault(other, -sign * _LARGEST)
    return found


def _inward(bound: float, sign: int) -> float:
    """Return the nearest float that lets no further number pass, as an integer if the bound is one. sign: 1 for an upper bound, -1 for a lower one."""
    nearest = float(bound)
    if sign * nearest > sign * bound:
        nearest = math.nextafter(nearest, -sign * math.inf)
    return int(nearest) if isinstance(bound, int) else bound


def _exact(name: str, value: Any, param: str) -> Any:
    """Return the value of `const` or `enum`. Raises InvalidRequestError for an integer in it that the compiler would round."""
    places = [value]
    while places:
        item = places.pop()
        if isinstance(item, int) and abs(item) > _EXACT:
            raise invalid(
                param, f"{name}: integers beyond 2^53 cannot be enforced, write texts instead, got {shorten(item)}"
            )
        if isinstance(item, dict | list):
            places += item.values() if isinstance(item, dict) else item
    return value


def _has_no_effect(name: str, value: Any) -> bool:
    """Return True for formats that are annotations, and for bounds that no reply reaches."""
    if name in _MOST_COUNTS:
        return isinstance(value, int | float) and value > _LARGEST_COUNT
    return name == "format" and isinstance(value, str) and value not in _FORMATS


def _rust_pattern(pattern: str) -> str:
    """Return a pattern of ECMA-262 in Rust's syntax, where a class may have others in it, and the operators &&, ~~ and --."""
    return _CLASS.sub(_rust_class, pattern)


def _rust_class(match: re.Match[str]) -> str:
    negation, body, end = match.groups()
    if not end:  # an escape, or no pattern
        return match[0]
    if not body:
        return r"[\s\S]" if negation else r"[^\s\S]"
    return f"[{negation}{''.join(map(_rust_range, _RANGE.finditer(body)))}]"


def _rust_range(match: re.Match[str]) -> str:
    chars = [char for char in match.groups() if char]
    is_range = not any(char.startswith(_SETS) for char in chars)
    return ("-" if is_range else r"\-").join(map(_in_class, chars))


def _in_class(char: str) -> str:
    return f"\\{char}" if char in ("[", "&", "~", "-") else char


def _has_few_items(schema: dict[str, Any]) -> bool:
    most = schema.get("maxItems")
    return isinstance(most, int) and most <= 1


def _lists_all(schema: dict[str, Any]) -> bool:
    """Return True if the properties of an object are all that it is meant to have."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if "additionalProperties" in schema or "unevaluatedProperties" in schema or "patternProperties" in schema:
        return False
    least = schema.get("minProperties", 0)
    return (
        all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )


def _combined(root: dict[str, Any]) -> frozenset[int]:
    """Return the ids of the schemas that describe an object together with another one."""
    found: set[int] = set()
    places = [root]
    while places:
        schema = places.pop()
        places += child_schemas(schema)
        if _num_parts(schema) > 1:
            _mark(schema, root, found)
    return frozenset(found)


def _num_parts(schema: dict[str, Any]) -> int:
    """Return the number of schemas that a value has to satisfy at once."""
    every = schema.get("allOf")
    own = any(name in schema for name in ("properties", "patternProperties", "additionalProperties"))
    others = sum(name in schema for name in ("anyOf", "oneOf", "$ref", "if", "dependentSchemas"))
    return own + others + (len(every) if isinstance(every, list) else 0)


def _mark(schema: dict[str, Any], root: dict[str, Any], found: set[int]) -> None:
    """Add the ids of a schema and of all that apply to the same value."""
    places = [schema]
    while places:
        part = places.pop()
        if id(part) in found:
            continue
        found.add(id(part))
        lists = (part.get(name) for name in _COMBINING)
        places += [member for members in lists if isinstance(members, list) for member in _objects(members)]
        target = referenced_schema(part.get("$ref"), root)
        if target is not None:
            places.append(target)


def referenced_schema(reference: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema that a reference inside the document means: a JSON pointer (RFC 6901) as the fragment of a URI."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    name, *steps = unquote(reference.removeprefix("#")).split("/")
    value: Any = root if not name else None  # what has a name is an anchor
    for step in steps:
        value = value.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else None


def child_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas directly inside a schema."""
    for name, value in schema.items():
        if name in _MAPPINGS and isinstance(value, dict):
            yield from _objects(list(value.values()))
        elif name in _LISTS and isinstance(value, list):
            yield from _objects(value)
        elif name in _SINGLE and isinstance(value, dict):
            yield value


def _objects(values: list[Any]) -> Iterator[dict[str, Any]]:
    return (value for value in values if isinstance(value, dict))
