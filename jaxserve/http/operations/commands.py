"""What whoever runs the server may ask of the engine."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from jaxserve.apis.routes import Route
from jaxserve.http.operations.schema import Obeyed
from jaxserve.http.reply import json_reply
from jaxserve.http.state import STATE
from jaxserve.ipc.messages import CommandName

_Command = partial(Route, "POST", tag="Operation", reply=Obeyed, errors=(400, 503))


@partial(_Command, "/reset_prefix_cache")
async def reset_prefix_cache(request: web.Request) -> web.StreamResponse:
    """Forget the prefixes that no request uses."""
    return await _obey(request, "reset_prefix_cache")


@partial(_Command, "/start_profile")
async def start_profile(request: web.Request) -> web.StreamResponse:
    """Begin a profile of the engine's process and its devices (--profile-dir)."""
    return await _obey(request, "start_profile")


@partial(_Command, "/stop_profile")
async def stop_profile(request: web.Request) -> web.StreamResponse:
    """End the profile, and write it. Meanwhile the engine does nothing else."""
    return await _obey(request, "stop_profile")


async def _obey(request: web.Request, name: CommandName) -> web.StreamResponse:
    await request.app[STATE].client.command(name)
    return json_reply(Obeyed())
