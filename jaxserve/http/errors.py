"""From exceptions to error replies, OpenAI's unless a route has another style. The only place of the HTTP side that turns one into a status."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from jaxserve.apis.schema.error import error_body
from jaxserve.errors import (
    REQUEST_ERRORS,
    InternalError,
    InvalidRequestError,
    PayloadTooLargeError,
    RateLimitError,
    RequestError,
    UnavailableError,
)
from jaxserve.ipc.messages import ErrorInfo

_log = logging.getLogger(__name__)

E = TypeVar("E", bound=Exception)

ErrorBody = Callable[[RequestError], msgspec.Struct]
"""How an error is spelled."""


def error_response(error: RequestError, status: int | None = None, body: ErrorBody = error_body) -> web.Response:
    """The reply for `error`, with the headers that its status asks for."""
    response = web.Response(
        body=msgspec.json.encode(body(error)),
        status=error.status if status is None else status,
        content_type="application/json",
    )
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RateLimitError | UnavailableError):
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def request_error(info: ErrorInfo | None) -> RequestError:
    """Return the exception that `info` describes; an InternalError for an unknown class."""
    if info is None:
        return InternalError("The request failed in the engine.")
    kind = REQUEST_ERRORS.get(info.error_class, InternalError)
    return kind(info.message, param=info.param, code=info.code)


def response_from_http_error(
    error: web.HTTPException, request: web.Request, max_body_size: int, body: ErrorBody = error_body
) -> web.Response:
    """aiohttp's own refusals (no such route, wrong method, body too large) in the API's form."""
    if error.status == 413:
        return error_response(too_large(max_body_size), body=body)
    text = {
        404: f"Unknown request URL: {request.method} {request.path}. /docs lists the known ones.",
        405: f"Not allowed to {request.method} on {request.path}.",
    }.get(error.status, error.reason or "The request was refused.")
    response = error_response(InvalidRequestError(text, code=_HTTP_CODES.get(error.status)), error.status, body)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def too_large(max_body_size: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_body_size} bytes (--max-body-size).")


def first_leaf(group: BaseExceptionGroup[E]) -> E:
    """The first of the errors that ended a group of tasks."""
    error: E | BaseExceptionGroup[E] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def hide_internal_error(error: Exception, request_id: str) -> InternalError:
    """Log an unexpected exception and return what the client may know of it."""
    _log.error("request %s failed", request_id, exc_info=error)
    return InternalError(f"The server had an error while processing your request (request id {request_id}).")
