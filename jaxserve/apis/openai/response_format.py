"""OpenAI's `response_format`."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from jaxserve.errors import invalid, unsupported
from jaxserve.frontend.checks import missing, shorten
from jaxserve.frontend.constraints import Constraint, only_constraint

_TYPES: Final = ("text", "json_object", "json_schema", "json", "regex", "grammar")


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`. With `strict` or without, the schema is enforced whole."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Annotated[
        str,
        Meta(
            description="`text`, `json_object`, `json_schema`; also `regex` with `pattern`, `grammar` with `grammar`."
        ),
    ]
    json_schema: JsonSchemaFormat | None = None
    schema: Annotated[
        dict[str, Any] | None,
        Meta(
            description="The schema as llama.cpp's and Together's clients send it, with `json_object` or `json_schema`."
        ),
    ] = None
    value: Annotated[
        dict[str, Any] | str | None,
        Meta(
            description="The schema as TGI's clients send it, also with the type `json`; with `regex` the expression."
        ),
    ] = None
    pattern: Annotated[str | None, Meta(description="Together's regular expression; only with `regex`.")] = None
    grammar: Annotated[str | None, Meta(description="Fireworks's grammar (GBNF or Lark); only with `grammar`.")] = None


def response_constraint(format_: ResponseFormat) -> Constraint | None:
    """Return the constraint of `response_format`; None for any text.

    Raises InvalidRequestError for a format that lacks its part, or has the part of another format: none is dropped.
    """
    if format_.type not in _TYPES:
        names = f"{', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
        raise unsupported("response_format.type", f"must be {names}, got {shorten(format_.type)}")
    schemas = {
        "json_schema.schema": format_.json_schema.schema if format_.json_schema is not None else None,
        "schema": format_.schema,
        "value": format_.value if isinstance(format_.value, dict) else None,
    }
    given = {f"response_format.{place}": schema for place, schema in schemas.items() if schema is not None}
    if given and format_.type not in ("json", "json_object", "json_schema"):
        raise invalid(next(iter(given)), f"it goes with the type json_schema, got {shorten(format_.type)}")
    is_expression = isinstance(format_.value, str)
    if is_expression and format_.pattern is not None:
        raise invalid("response_format.value", "give `pattern` or `value`, not both")
    expression = format_.value if isinstance(format_.value, str) else format_.pattern
    for kind, part, text in (
        ("regex", "value" if is_expression else "pattern", expression),
        ("grammar", "grammar", format_.grammar),
    ):
        if (text is not None) != (format_.type == kind):
            if text is None:
                raise missing(f"response_format.{part}")
            raise invalid(f"response_format.{part}", f"it goes with the type {kind}, got {shorten(format_.type)}")
        if text is not None:
            return Constraint("regex" if kind == "regex" else "grammar", text, f"response_format.{part}")
    if format_.type == "json" and not given:
        raise missing("response_format.value")
    found = only_constraint({place: Constraint("json", schema, place) for place, schema in given.items()})
    return found if found is not None else format_constraint(format_.type, None)


def format_constraint(
    kind: str, schema: dict[str, Any] | None, param: str = "response_format", place: str = "json_schema.schema"
) -> Constraint | None:
    """Return the constraint of a format of this type; None for any text. Raises InvalidRequestError.

    param: the field of the format; place: of the schema below it.
    """
    match kind:
        case "text":
            return None
        case "json_object":
            return Constraint("json_object", True, param)
        case "json_schema":
            if schema is None:
                raise missing(f"{param}.{place}")
            return Constraint("json", schema, f"{param}.{place}")
    raise unsupported(f"{param}.type", f"must be text, json_object or json_schema, got {shorten(kind)}")
