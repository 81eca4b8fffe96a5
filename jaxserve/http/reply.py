"""A struct as a JSON reply."""

from __future__ import annotations

import msgspec
from aiohttp import web


def json_reply(reply: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """The response that carries `reply`."""
    return web.Response(
        body=msgspec.json.encode(reply), status=status, headers=headers, content_type="application/json"
    )
