"""What an endpoint file exports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.server.schema.error import error_body


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiStyle:
    """What one vendor's API does in its own way on all of its routes. The default is OpenAI's."""

    error_body: Callable[[RequestError, str], msgspec.Struct] = error_body
    """From an error and the id of its request."""
    request_id_header: str | None = None
    """Has the id of the request, too."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route. Guarded by the API key unless `is_public`."""

    method: Literal["GET", "POST"]
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    is_public: bool = False
    style: ApiStyle = ApiStyle()
