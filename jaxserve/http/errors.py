"""From exceptions to error replies, in OpenAI's form unless a route has another style."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from jaxserve.apis.schema.error import error_body
from jaxserve.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    RateLimitError,
    RequestError,
    UnavailableError,
    UnknownUrlError,
)
from jaxserve.http.paths import PathHint

ErrorBody = Callable[[RequestError], msgspec.Struct]
"""Makes the body of an error reply."""


def error_response(error: RequestError, status: int | None = None, body: ErrorBody = error_body) -> web.Response:
    """Return the reply for `error`, with the headers of its status."""
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


def response_from_http_error(
    error: web.HTTPException,
    request: web.Request,
    max_body_size: int,
    body: ErrorBody = error_body,
    hint: PathHint | None = None,
) -> web.Response:
    """Return the API's error reply for an error of aiohttp: no such route, wrong method, body too large.

    hint: what the client may do instead of using this path.
    """
    if error.status == 413:
        return error_response(too_large(max_body_size), body=body)
    if hint is not None and (error.status == 404 or hint.is_unserved):
        verb = "This server does not have" if hint.is_unserved else "Unknown request URL:"
        return error_response(UnknownUrlError(f"{verb} {request.method} {request.path}. {hint.text}"), body=body)
    text, code = error.reason or "The request was refused.", None
    if error.status == 405:
        text, code = f"Not allowed to {request.method} on {request.path}.", "method_not_allowed"
    response = error_response(InvalidRequestError(text, code=code), error.status, body)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def too_slow(timeout_s: float) -> InvalidRequestError:
    return InvalidRequestError(f"The body did not arrive within {timeout_s:g} s (--body-timeout).")


def too_large(max_body_size: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_body_size} bytes (--max-body-size).")
