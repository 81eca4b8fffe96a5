"""OpenAI's `response_format`."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.errors import unsupported
from jaxserve.frontend.checks import missing, shorten
from jaxserve.frontend.request import Constraint


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`. With `strict` or without, the schema is enforced whole."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None


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
