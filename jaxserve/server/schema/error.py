"""The error object of OpenAI's API."""

from __future__ import annotations

import msgspec

from jaxserve.errors import RequestError


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_body(error: RequestError, request_id: str = "") -> ErrorBody:
    """`{"error": {"message", "type", "param", "code"}}`; the request's id is in a header."""
    return ErrorBody(ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code))
