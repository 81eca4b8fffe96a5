"""Commands of the operator to the engine."""

from __future__ import annotations

from functools import partial

from jaxserve.apis.routes import Call, Route
from jaxserve.http.operations.schema import Obeyed

_Command = partial(Route, "POST", tag="Operation", reply=Obeyed, errors=(400, 503))


@partial(_Command, "/reset_prefix_cache")
async def reset_prefix_cache(call: Call) -> Obeyed:
    """Forget the prefixes that no request uses."""
    await call.frontend.client.command("reset_prefix_cache")
    return Obeyed()


@partial(_Command, "/start_profile")
async def start_profile(call: Call) -> Obeyed:
    """Begin a profile of the engine's process and its devices (--profile-dir)."""
    await call.frontend.client.command("start_profile")
    return Obeyed()


@partial(_Command, "/stop_profile")
async def stop_profile(call: Call) -> Obeyed:
    """End the profile, and write it. Meanwhile the engine does nothing else."""
    await call.frontend.client.command("stop_profile")
    return Obeyed()
