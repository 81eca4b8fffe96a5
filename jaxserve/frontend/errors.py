"""From errors of the engine and unexpected exceptions to the RequestErrors that clients see."""

from __future__ import annotations

import logging
from typing import TypeVar

from jaxserve.errors import REQUEST_ERRORS, InternalError, RequestError
from jaxserve.ipc.messages import ErrorInfo

_log = logging.getLogger(__name__)

E = TypeVar("E", bound=Exception)


def request_error(info: ErrorInfo | None) -> RequestError:
    """Return the exception that `info` describes; an InternalError for an unknown class."""
    if info is None:
        return InternalError("The request failed in the engine.")
    kind = REQUEST_ERRORS.get(info.error_class, InternalError)
    return kind(info.message, param=info.param, code=info.code)


def first_leaf(group: BaseExceptionGroup[E]) -> E:
    """Return the first of the errors that ended a group of tasks."""
    error: E | BaseExceptionGroup[E] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def hide_internal_error(error: Exception, request_id: str) -> InternalError:
    """Log an unexpected exception and return the error that its client sees."""
    _log.error("request %s failed", request_id, exc_info=error)
    return InternalError(f"The server had an error while processing your request (request id {request_id}).")
