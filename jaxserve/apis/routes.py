"""Endpoints without their transport: a route is declared beside its schemas and its function; `http/` serves it.

`@partial(Route, METHOD, PATH, ...)` makes a route of the function below it. The function's parameters are its inputs:
`call`, then `body` and `query` (structs), then the parameters of the path. Every route of a module below `apis/` is
served, and described in `/openapi.json` and `/docs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Protocol, TypeVar, get_type_hints

import msgspec

from jaxserve.apis.responses.service import ResponseService
from jaxserve.apis.schema.error import error_body
from jaxserve.errors import RequestError
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.encode import RequestNotes
from jaxserve.frontend.frontend import Frontend, ServedModels
from jaxserve.frontend.handle import RequestHandle, TokenCounts

T = TypeVar("T")
Tag = Literal["OpenAI", "Anthropic", "Scores", "Tokens", "Operation"]


class OffLoop(Protocol):
    """Runs work beside the event loop if it takes long."""

    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request and what serves it, as an endpoint sees them."""

    frontend: Frontend
    """The frontend of the model that the request names, or of the first one."""
    models: ServedModels
    responses: ResponseService
    request_id: str
    ignored_fields: Sequence[str] = ()
    """Names of the body's unknown fields."""
    off_loop: OffLoop
    """Runs what looks at the whole body: in a thread if that is large."""
    note: Callable[[RequestNotes], None]
    """Keeps what the headers of the reply say of the request; called before the reply begins."""
    reserve: Callable[[int], None]
    """Reserves memory for bytes that the request makes the server read beside its body, until its handler returns. Raises
    RateLimitError if there is none."""
    cleanup: ExitStack
    """Closed at the end of the reply."""


class Formatter(Protocol):
    """The format of one request's reply, whole or streamed."""

    def opening(self) -> Sequence[msgspec.Struct]:
        """Return the chunks before the first delta."""
        ...

    def chunks(self, delta: OutputDelta, counts: TokenCounts | None) -> Sequence[msgspec.Struct]:
        """Return the chunks of one delta; `counts` if every chunk carries the usage."""
        ...

    def closing(self, counts: TokenCounts) -> Sequence[msgspec.Struct]:
        """Return the chunks after the last delta."""
        ...

    def reply(self, choices: Sequence[Sequence[OutputDelta]], counts: TokenCounts) -> msgspec.Struct:
        """Return the whole reply, from the deltas of each choice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A reply that is being generated."""

    handle: RequestHandle
    formatter: Formatter
    is_streamed: bool
    has_continuous_usage: bool = False
    """True: every chunk carries the usage so far."""
    fail: Callable[[RequestError], msgspec.Struct] | None = None
    """Returns the last chunk of a stream that fails. None: the error object of the route's style."""
    keep: Callable[[Any], None] | None = None
    """Stores a whole reply. Called on the event loop once the reply is encoded, before it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A reply in the format of a generated one that needs no engine."""

    deltas: Sequence[OutputDelta]
    """One per choice."""
    counts: TokenCounts
    formatter: Formatter
    is_streamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A reply as bytes."""

    body: bytes
    media_type: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Reply = msgspec.Struct | Generated | Computed | Encoded
"""A struct is sent as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiStyle:
    """Conventions of one vendor's API that hold for all of its routes. Default: OpenAI's."""

    error_body: Callable[[RequestError, str], msgspec.Struct] = error_body
    """Makes the error object from an error and the request's id; its return annotation is the struct."""
    request_id_header: str | None = None
    """A second header with the request's id."""
    ping: msgspec.Struct | None = None
    """The event that keeps a silent stream alive. None: a comment."""

    @property
    def error_struct(self) -> Any:
        return get_type_hints(self.error_body)["return"]


@dataclass(frozen=True, slots=True)
class Route:
    """One route, its function, and its description. Guarded by the API key unless `is_public`."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[..., Awaitable[Reply]]
    is_public: bool = False
    _: KW_ONLY
    summary: str | None = None
    """One line; by default the first one of the function's docstring."""
    tag: Tag
    name: str | None = None
    """Unique name of the operation; by default the function's."""
    style: ApiStyle = ApiStyle()
    reply: Any = None
    """The JSON of a 200: a struct or a union of structs; None for other media types."""
    event: Any = None
    """The data of one server-sent event, if the reply can be streamed: a struct or a union of structs."""
    last_event: str | None = None
    """The data of the event after all those, which is not JSON."""
    errors: tuple[int, ...] = ()
    """Statuses of error objects, beside those of any route, and of any with parameters or a body."""
    other_replies: tuple[tuple[int, Any], ...] = ()
    """Replies that are no error objects, by status."""
    media_type: str = "application/json"
    """Media type of a 200 that is not streamed."""

    @property
    def is_command(self) -> bool:
        """True for a command of the operator."""
        return self.tag == "Operation" and self.method != "GET"

    @property
    def headline(self) -> str:
        """The purpose in a line."""
        return self.summary or inspect.cleandoc(self.handler.__doc__ or "").partition("\n")[0]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Types of the function's inputs, by name."""
        return {name: kind for name, kind in get_type_hints(self.handler).items() if name not in ("call", "return")}

    @property
    def request(self) -> type[msgspec.Struct] | None:
        """The struct of the body."""
        return self.parameters.get("body")

    @property
    def query(self) -> type[msgspec.Struct] | None:
        """The struct of the URL's query, if it has parameters."""
        struct: type[msgspec.Struct] | None = self.parameters.get("query")
        return struct if struct is not None and struct.__struct_fields__ else None
