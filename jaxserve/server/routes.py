"""What an endpoint file exports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Route:
    """One route. Guarded by the API key unless `is_public`."""

    method: Literal["GET", "POST"]
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    is_public: bool = False
