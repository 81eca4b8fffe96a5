"""`GET /version`."""

from __future__ import annotations

from aiohttp import web

from jaxserve import __version__
from jaxserve.server.routes import Route


async def version(request: web.Request) -> web.StreamResponse:
    return web.json_response({"version": __version__})


ROUTES = (Route("GET", "/version", version, is_public=True),)
