"""`GET /version`."""

from __future__ import annotations

from aiohttp import web

from jaxserve import __version__
from jaxserve.server.reply import json_reply
from jaxserve.server.routes import Route
from jaxserve.server.schema.operation import VersionReply


async def version(request: web.Request) -> web.StreamResponse:
    return json_reply(VersionReply(__version__))


ROUTES = (
    Route(
        "GET",
        "/version",
        version,
        is_public=True,
        summary="The version of jaxserve.",
        tag="Operation",
        reply=VersionReply,
    ),
)
