"""Commands of the operator to the engine."""

from __future__ import annotations

from functools import partial

from jaxserve.apis.routes import Call, Route
from jaxserve.apis.schema.common import ModelQuery
from jaxserve.http.operations.schema import CommandResult, FlightRecords
from jaxserve.ipc.messages import CommandOptions

_Command = partial(Route, "POST", tag="Operation", reply=CommandResult, errors=(400, 403, 429, 503))


@partial(_Command, "/reset_prefix_cache")
async def reset_prefix_cache(call: Call, query: ModelQuery) -> CommandResult:
    """Forget the prefixes that no request uses."""
    await call.frontend.client.command("reset_prefix_cache")
    return CommandResult()


@partial(_Command, "/start_profile")
async def start_profile(call: Call, query: ModelQuery) -> CommandResult:
    """Begin a profile of the engine's process and its devices (--profile-dir)."""
    await call.frontend.client.command("start_profile")
    return CommandResult()


@partial(_Command, "/stop_profile")
async def stop_profile(call: Call, query: ModelQuery) -> CommandResult:
    """End the profile, and write it. Meanwhile the engine does nothing else."""
    await call.frontend.client.command("stop_profile")
    return CommandResult()


@partial(_Command, "/dump_flight_record", reply=FlightRecords)
async def dump_flight_record(call: Call, query: ModelQuery) -> FlightRecords:
    """Write the scheduler's last decisions to files for `jaxserve replay` (--flight-recorder-dir). Steps go on."""
    client = call.frontend.client
    client.require_ready()
    states = await client.engines.command("dump_flight_record", CommandOptions())
    return FlightRecords([state.flight_record for state in states])
