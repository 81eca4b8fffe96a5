"""The page at `/`: a chat and a live picture of the engine. Static files of the package, and one summary in JSON.

The page asks nothing of other hosts and runs no inline script. Its files need no key; all that it shows of the server does.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Final

from jaxserve.apis.routes import Encoded, Route
from jaxserve.apis.schema.common import ModelQuery
from jaxserve.errors import UnknownUrlError
from jaxserve.http.handler import HttpCall
from jaxserve.http.operations.live import LiveState, live_state

_FILES: Final = files("jaxserve.http") / "ui"
_MEDIA_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@partial(Route, "GET", "/", is_public=True, tag="Operation", media_type="text/html")
async def page(call: HttpCall) -> Encoded:
    """Show the page: a chat and a live picture of the engine. 404 with `--no-ui`."""
    return _file(call, "index.html")


@partial(Route, "GET", r"/ui/{name:[a-z]+\.[a-z]+}", is_public=True, tag="Operation", media_type="text/css")
async def page_file(call: HttpCall, name: str) -> Encoded:
    """Return a style sheet or a script of the page."""
    return _file(call, name)


@partial(Route, "GET", "/ui/state", tag="Operation", reply=LiveState)
async def page_state(call: HttpCall, query: ModelQuery) -> LiveState:
    """Summarise the state of the server for the page: numbers of one model, never prompts or replies."""
    _require_page(call)
    frontend = call.frontend
    frontend.require_model(query.model)
    snapshots = await call.state.peers.snapshots(frontend.metrics)
    uptime_s = time.monotonic() - frontend.started_s
    return live_state(snapshots, frontend.model_name, frontend.client.model_info, call.state.rejections.last, uptime_s)


def _file(call: HttpCall, name: str) -> Encoded:
    _require_page(call)
    media_type = _MEDIA_TYPES.get(PurePosixPath(name).suffix)
    found = _FILES / name
    if media_type is None or "/" in name or not found.is_file():
        raise UnknownUrlError("The page has no such file.")
    return Encoded(body=found.read_bytes(), media_type=f"{media_type}; charset=utf-8", headers=_HEADERS)


def _require_page(call: HttpCall) -> None:
    if not call.state.has_page:
        raise UnknownUrlError("This server has no page: it was started with --no-ui. /docs lists its URLs.")
