"""The exception tree.

    JaxserveError                     every error raised on purpose
    ├── StartupError                  the server cannot start: one line on stderr, exit code 2
    │   ├── ConfigError               a flag, a config file or an environment variable
    │   │   └── DoesNotFitError       these settings need more memory than available
    │   └── CheckpointError           a damaged, truncated or unsupported checkpoint
    └── RequestError                  a request ends with an OpenAI-style error object
        ├── InvalidRequestError       400
        │   ├── UnsupportedParameterError
        │   └── ContextLengthError
        ├── AuthenticationError       401
        ├── OriginError               403
        ├── UnknownUrlError           404
        ├── ModelNotFoundError        404
        ├── ResponseNotFoundError     404
        ├── PayloadTooLargeError      413
        ├── UnsupportedMediaTypeError 415
        ├── RateLimitError            429
        ├── InternalError             500
        └── UnavailableError          503

Each RequestError class knows its HTTP status, OpenAI `type` and OpenAI `code`.
"""

from __future__ import annotations

from typing import ClassVar


class JaxserveError(Exception):
    """Base of every error raised on purpose."""


class StartupError(JaxserveError):
    """The server cannot start. The message is one readable line; the process exits with `exit_code`."""

    exit_code: ClassVar[int] = 2


class ConfigError(StartupError):
    """A configuration value is wrong: names the field, the value and what is allowed."""


class DoesNotFitError(ConfigError):
    """The settings are valid but need more memory than available: names both amounts and what to change."""


class CheckpointError(StartupError):
    """A checkpoint cannot be used: names the file, the tensor or key, what was expected and what was found."""


class RequestError(JaxserveError):
    """A request that ends with an error object `{"error": {"message", "type", "param", "code"}}`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code


class InvalidRequestError(RequestError):
    """The request is malformed or out of range: names the field, the value and the limit."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class UnsupportedParameterError(InvalidRequestError):
    """A known request field is not supported."""

    default_code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the context or the KV cache."""

    default_code = "context_length_exceeded"


def invalid(param: str, reason: str) -> InvalidRequestError:
    """Return the error that names a field, its value and the limit. reason: a sentence without its full stop."""
    return InvalidRequestError(f"Invalid value for '{param}': {reason}.", param=param)


def unsupported(param: str, reason: str) -> UnsupportedParameterError:
    """Return the error that names a known but unsupported field. reason: the sentence after its name."""
    return UnsupportedParameterError(f"Unsupported parameter: '{param}' {reason}.", param=param)


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"


class OperatorError(RequestError):
    """The command is for the operator, and this request is not the operator's."""

    status = 403
    type = "invalid_request_error"
    default_code = "operator_only"


class OriginError(RequestError):
    """Web pages of this origin may not call the server."""

    status = 403
    type = "invalid_request_error"
    default_code = "origin_not_allowed"


class UnknownUrlError(RequestError):
    """No route has this path."""

    status = 404
    type = "invalid_request_error"
    default_code = "unknown_url"


class ModelNotFoundError(RequestError):
    """The requested model is not served."""

    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"


class ResponseNotFoundError(RequestError):
    """No response with this id is stored: it never existed, was deleted, or expired."""

    status = 404
    type = "invalid_request_error"
    default_code = "response_not_found"


class PayloadTooLargeError(RequestError):
    """The request body is larger than the configured limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class UnsupportedMediaTypeError(RequestError):
    """The body is not plain `application/json`."""

    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class RateLimitError(RequestError):
    """The queue is full. `retry_after_s` becomes the `Retry-After` header."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    retry_after_s: int = 1
    reason: str = "queue_full"
    """The limit, as the metric `admission_rejections` names it, of requests that are submitted to an engine."""


class InternalError(RequestError):
    """The server failed. The message is fixed text; only the log has details."""

    status = 500
    type = "server_error"
    default_code = "internal_error"


class UnavailableError(RequestError):
    """The engine is loading, draining or gone."""

    status = 503
    type = "service_unavailable"
    default_code = "service_unavailable"
    retry_after_s: ClassVar[int] = 5


def _subclasses(cls: type[RequestError]) -> dict[str, type[RequestError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


REQUEST_ERRORS: dict[str, type[RequestError]] = _subclasses(RequestError)
"""Request errors by class name: an error crosses processes as (class name, message, param, code)."""


def shown(text: str, limit: int = 80) -> str:
    """Return a name quoted for a one-line error: control characters escaped, long names cut."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if this process or its device had too little memory, in the words of Python or of XLA."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
