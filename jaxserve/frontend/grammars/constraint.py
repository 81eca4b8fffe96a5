"""What a request says of the form of its replies: `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from jaxserve.apis.schema.decode import missing, shorten
from jaxserve.errors import invalid, unsupported
from jaxserve.ipc.messages import Grammar

_ANY_OBJECT: Final = Grammar("json_schema", '{"type":"object"}')
_COUNTS: Final = ("minItems", "minLength", "minProperties")
_MAX_COUNT: Final = 100_000
"""No context holds more; whoever asks for it would get a reply that is cut off."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`. With `strict` or without, the schema is enforced whole."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class NamedGrammar(msgspec.Struct, frozen=True):
    """A grammar and the field of the request that asks for it."""

    grammar: Grammar
    param: str


def requested_grammar(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, max_depth: int
) -> NamedGrammar | None:
    """What the fields ask for; None: any text. Raises InvalidRequestError."""
    formatted = None if response_format is None else _of_format(response_format, max_depth)
    if structured is None:
        return formatted
    if formatted is not None:
        raise invalid("structured_outputs", "not together with response_format")
    return _of_outputs(structured, max_depth)


def schema_grammar(schema: dict[str, Any], param: str, max_depth: int) -> Grammar:
    """The grammar of a JSON schema. Refuses what nothing could be checked against or nobody could write."""
    places: list[tuple[Any, int]] = [(schema, 1)]
    if "x-guidance" in schema:
        raise invalid(param, "x-guidance: options of the compiler are not for requests")
    while places:
        value, depth = places.pop()
        if depth > max_depth:
            raise invalid(param, f"nested deeper than {max_depth} (--max-grammar-depth)")
        if isinstance(value, dict):
            for name in _COUNTS:
                if isinstance(count := value.get(name), int) and count > _MAX_COUNT:
                    raise invalid(param, f"{name}: at most {_MAX_COUNT}, got {shorten(count)}")
            places += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            places += [(child, depth + 1) for child in value]
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _of_format(response_format: ResponseFormat, max_depth: int) -> NamedGrammar | None:
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return NamedGrammar(_ANY_OBJECT, "response_format")
        case "json_schema":
            param = "response_format.json_schema.schema"
            if response_format.json_schema is None or response_format.json_schema.schema is None:
                raise missing(param)
            return NamedGrammar(schema_grammar(response_format.json_schema.schema, param, max_depth), param)
    raise unsupported(
        "response_format.type", f"must be text, json_object or json_schema, got {shorten(response_format.type)}"
    )


def _of_outputs(structured: StructuredOutputs, max_depth: int) -> NamedGrammar | None:
    asked = {name: value for name, value in msgspec.structs.asdict(structured).items() if value not in (None, False)}
    if not asked:
        return None
    if len(asked) > 1:
        raise invalid("structured_outputs", f"one kind of constraint, got {', '.join(asked)}")
    ((name, value),) = asked.items()
    param = f"structured_outputs.{name}"
    match name:
        case "json":
            return NamedGrammar(schema_grammar(_schema(value, param), param, max_depth), param)
        case "json_object":
            return NamedGrammar(_ANY_OBJECT, param)
        case "choice":
            if not all(value) or not value:
                raise invalid(param, "at least one choice, and none that is empty")
            return NamedGrammar(Grammar("lark", "start: " + " | ".join(map(json.dumps, value))), param)
        case "regex":
            return NamedGrammar(Grammar("regex", value), param)
    return NamedGrammar(Grammar("lark", value), param)


def _schema(value: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise invalid(param, f"it is no JSON object: {error}") from None
