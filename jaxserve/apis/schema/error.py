"""The error object of OpenAI's API."""

from __future__ import annotations

import msgspec

from jaxserve.errors import RequestError


class ErrorDetail(msgspec.Struct):
    message: str
    """Names the field, the value and the limit."""
    type: str
    """The kind of error, as OpenAI names it."""
    param: str | None
    """The path of the field that is wrong."""
    code: str | None
    """Stable: programs may compare it."""


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(error: RequestError, request_id: str = "") -> ErrorBody:
    """`{"error": {"message", "type", "param", "code"}}`; the request's id is in a header."""
    return ErrorBody(ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code))
