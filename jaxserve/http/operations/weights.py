"""Commands of the operator that pause the engine or change its weights. They need --allow-weight-updates."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.apis.routes import Call, Route
from jaxserve.apis.schema.common import ModelQuery
from jaxserve.bounds import Bound
from jaxserve.errors import InvalidRequestError, invalid
from jaxserve.http.handler import HttpCall
from jaxserve.http.operations.schema import ControlResult, Paused, Sleeping
from jaxserve.ipc.messages import CommandName, CommandOptions, PauseMode

_Mode = Annotated[
    PauseMode | None,
    Meta(
        description="What happens to running requests. `keep`: they continue afterwards; `wait`: they end first, and no "
        "waiting request starts; `abort`: all requests end with status 503."
    ),
]


class PauseQuery(ModelQuery):
    """`mode` is `abort` by default."""

    mode: _Mode = None


class SleepQuery(ModelQuery):
    level: Annotated[
        int | None,
        Bound("value", 1, 2),
        Meta(
            description="1: a copy of the weights stays in host memory; 2: they are read again from where they came. Default: 1."
        ),
    ] = None
    mode: _Mode = None


class UpdateWeightsRequest(msgspec.Struct):
    model: Annotated[
        str | None,
        Bound("characters", 1),
        Meta(description="A folder, a GGUF file, or a hub id, with weights of the same shapes."),
    ] = None
    tensors: Annotated[
        str | None,
        Bound("characters", 1),
        Meta(
            description="Instead of `model`: a safetensors file, such as one in shared memory, whose tensors replace those "
            "of the same names; the others stay."
        ),
    ] = None
    mode: _Mode = None


class LoadAdapterRequest(msgspec.Struct):
    lora_name: Annotated[str, Bound("characters", 1, 256), Meta(description="The name by which requests choose it.")]
    lora_path: Annotated[str, Bound("characters", 1), Meta(description="A folder as PEFT saves it, or a hub id.")]


class UnloadAdapterRequest(msgspec.Struct):
    lora_name: Annotated[str, Bound("characters", 1), Meta(description="The name of the adapter.")]


_Command = partial(Route, "POST", tag="Operation", reply=ControlResult, errors=(400, 403, 429, 503))


@partial(_Command, "/v1/load_lora_adapter")
async def load_lora_adapter(call: HttpCall, body: LoadAdapterRequest, query: ModelQuery) -> ControlResult:
    """Load a LoRA adapter into a free place (--max-loras). Nothing is compiled, and requests go on meanwhile."""
    for frontend in call.models:
        if body.lora_name in (frontend.model_names if frontend is call.frontend else frontend.names):
            itself = "the model itself" if frontend is call.frontend else "another model of this server"
            raise invalid("lora_name", f"{body.lora_name!r} is the name of {itself}")
    if len(call.frontend.client.engines.models()) > 1:
        raise InvalidRequestError("Adapters cannot be loaded while several replicas serve (--replicas).")
    return await _run(call, "load_adapter", CommandOptions(adapter=body.lora_name, source=body.lora_path))


@partial(_Command, "/v1/unload_lora_adapter", errors=(400, 403, 404, 429, 503))
async def unload_lora_adapter(call: HttpCall, body: UnloadAdapterRequest, query: ModelQuery) -> ControlResult:
    """Unload a LoRA adapter. Its requests under way finish; further ones get 404."""
    return await _run(call, "unload_adapter", CommandOptions(adapter=body.lora_name))


@partial(_Command, "/update_weights")
async def update_weights(call: HttpCall, body: UpdateWeightsRequest, query: ModelQuery) -> ControlResult:
    """Replace the weights by others of the same shapes, between two steps. Nothing is compiled."""
    if body.model is None and body.tensors is None:
        raise invalid("model", "is needed, or `tensors` instead of it")
    if body.model is not None and body.tensors is not None:
        raise invalid("tensors", "must not be given beside `model`, which has all tensors")
    options = CommandOptions(mode=body.mode or "keep", model=body.model or "", tensors=body.tensors or "")
    return await _run(call, "update_weights", options)


@partial(_Command, "/pause")
async def pause(call: HttpCall, query: PauseQuery) -> ControlResult:
    """Run no further step until `/resume`. Requests wait meanwhile."""
    return await _run(call, "pause", CommandOptions(mode=query.mode or "abort"))


@partial(_Command, "/resume")
async def resume(call: HttpCall, query: ModelQuery) -> ControlResult:
    """End a pause."""
    return await _run(call, "resume", CommandOptions())


@partial(_Command, "/sleep")
async def sleep(call: HttpCall, query: SleepQuery) -> ControlResult:
    """Give the devices' memory of weights and KV cache back until `/wake_up`. New requests get 503 meanwhile."""
    return await _run(call, "sleep", CommandOptions(mode=query.mode or "abort", sleep_level=query.level or 1))


@partial(_Command, "/wake_up")
async def wake_up(call: HttpCall, query: ModelQuery) -> ControlResult:
    """Bring the weights and an empty KV cache back, and continue."""
    return await _run(call, "wake_up", CommandOptions())


@partial(Route, "GET", "/is_paused", tag="Operation", reply=Paused, errors=(503,))
async def is_paused(call: Call, query: ModelQuery) -> Paused:
    """Report whether the engine is paused, or sleeps."""
    call.frontend.require_model(query.model)
    return Paused((await call.frontend.client.command("engine_state")).is_paused)


@partial(Route, "GET", "/is_sleeping", tag="Operation", reply=Sleeping, errors=(503,))
async def is_sleeping(call: Call, query: ModelQuery) -> Sleeping:
    """Report whether the engine sleeps."""
    call.frontend.require_model(query.model)
    return Sleeping((await call.frontend.client.command("engine_state")).is_sleeping)


async def _run(call: HttpCall, name: CommandName, options: CommandOptions) -> ControlResult:
    if not call.state.allows_weight_updates:
        raise InvalidRequestError(
            "This server was started without --allow-weight-updates: it neither pauses nor changes its weights.",
            code="command_disabled",
        )
    return ControlResult((await call.frontend.client.command(name, options)).weight_version)
