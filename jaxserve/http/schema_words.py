"""JSON schemas in a few words, for the pages that people read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def type_text(schema: dict[str, Any]) -> str:
    """Return the type of a value in words; a name in angle brackets is another schema's."""
    if "$ref" in schema:
        return f"<{schema['$ref'].rpartition('/')[2]}>"
    if "anyOf" in schema:
        return " or ".join(type_text(option) for option in schema["anyOf"] if option != {"type": "null"})
    if "enum" in schema:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    kind = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {type_text(schema['additionalProperties'])}"
    return str(kind)


def range_text(schema: dict[str, Any]) -> str:
    """Return the range of a value in words; empty if the schema has none."""
    return ", ".join(_ranges(schema))


def _ranges(schema: dict[str, Any]) -> Iterator[str]:
    each = schema.get("items", {})
    texts = each if isinstance(each, dict) and "minLength" in each else schema
    for words, noun, low, high in (
        (schema, "", "minimum", "maximum"),
        (schema, " items", "minItems", "maxItems"),
        (texts, " characters", "minLength", "maxLength"),
    ):
        least = _plain(words[low]) if low in words else None
        if low == "minimum" and "exclusiveMinimum" in words:
            least = f"more than {_plain(words['exclusiveMinimum'])}"
        if high in words:
            yield f"{least} to {_plain(words[high])}{noun}"
        elif least is not None:
            yield f"at least {least}{noun}"


def _plain(bound: float) -> str:
    """Return a number in words: large powers of two as such."""
    if float(bound).is_integer():
        whole = int(bound)
        for exponent in (31, 63):
            for value, text in ((2**exponent - 1, f"2^{exponent} - 1"), (-(2**exponent), f"-2^{exponent}")):
                if whole == value:
                    return text
        return str(whole)
    return str(bound)


def payload_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body, or that of the data of server-sent events."""
    data = schema.get("properties", {}).get("data", {})
    payload: dict[str, Any] = data.get("anyOf", [data])[0].get("contentSchema", schema)
    return payload
