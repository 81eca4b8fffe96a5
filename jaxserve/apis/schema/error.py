"""The error object of OpenAI's API."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.errors import RequestError


class ErrorDetail(msgspec.Struct):
    message: Annotated[str, Meta(description="One line with the field, the value and the limit.")]
    type: Annotated[str, Meta(description="Type of the error, as OpenAI names it.")]
    param: Annotated[str | None, Meta(description="Path of the invalid field.")]
    code: Annotated[str | None, Meta(description="Stable code for programs.")]


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(error: RequestError, request_id: str = "") -> ErrorBody:
    """Return `{"error": {"message", "type", "param", "code"}}`; the request's id is in a header."""
    return ErrorBody(ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code))
