"""What an endpoint file holds: its routes. `@partial(Route, ...)` makes one of the handler below it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_type_hints

import msgspec
from aiohttp import web

from jaxserve.apis.schema.error import error_body
from jaxserve.errors import RequestError

Tag = Literal["OpenAI", "Anthropic", "Scores", "Tokens", "Operation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiStyle:
    """What one vendor's API does in its own way on all of its routes. The default is OpenAI's."""

    error_body: Callable[[RequestError, str], msgspec.Struct] = error_body
    """From an error and the id of its request. Annotated with the struct that it returns."""
    request_id_header: str | None = None
    """Has the id of the request, too."""

    @property
    def error_struct(self) -> Any:
        return get_type_hints(self.error_body)["return"]


@dataclass(frozen=True, slots=True)
class Route:
    """One route, and all that `/openapi.json` says of it. Guarded by the API key unless `is_public`."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    is_public: bool = False
    _: KW_ONLY
    summary: str | None = None
    """One line; the handler's if it is not given."""
    tag: Tag
    name: str | None = None
    """Of the operation, no other's; that of the handler if it is not given."""
    style: ApiStyle = ApiStyle()
    query: type[msgspec.Struct] | None = None
    """What may stand behind the question mark of the URL."""
    request: type[msgspec.Struct] | None = None
    """The body."""
    reply: Any = None
    """The JSON of a 200: a struct or a union of structs; None for other media types."""
    event: Any = None
    """The data of one server-sent event, where the reply can be streamed: a struct or a union of structs."""
    last_event: str | None = None
    """The data of the event behind all those, which is not JSON."""
    errors: tuple[int, ...] = ()
    """Statuses of error objects, beside those that any route has, and one with parameters or a body."""
    other_replies: tuple[tuple[int, Any], ...] = ()
    """By status, those that are not error objects."""
    media_type: str = "application/json"
    """Of a 200 that is not streamed."""

    @property
    def headline(self) -> str:
        """What it is for, in a line."""
        return self.summary or inspect.cleandoc(self.handler.__doc__ or "").partition("\n")[0]


API_ROUTES: web.AppKey[tuple[Route, ...]] = web.AppKey("api_routes", tuple)
"""Every route of the application."""
