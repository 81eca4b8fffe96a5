"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from jaxserve.apis.openai.models_schema import ModelCard, ModelList
from jaxserve.apis.routes import Route
from jaxserve.http.reply import json_reply
from jaxserve.http.state import STATE, ServerState


@partial(Route, "GET", "/v1/models", tag="OpenAI", reply=ModelList)
async def list_models(request: web.Request) -> web.StreamResponse:
    """The names that requests may use."""
    state = request.app[STATE]
    return json_reply(ModelList([_card(state, name) for name in (*state.model_names, *state.adapters)]))


@partial(Route, "GET", "/v1/models/{name:.+}", tag="OpenAI", reply=ModelCard)
async def show_model(request: web.Request) -> web.StreamResponse:
    """One of these names."""
    state = request.app[STATE]
    name = request.match_info["name"]
    state.require_model(name)
    return json_reply(_card(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    model_info = state.client.model_info
    max_model_len = model_info.max_model_len if model_info is not None else None
    is_adapter = name in state.adapters
    return ModelCard(
        id=name,
        created=state.created,
        root=state.adapters[name] if is_adapter else state.model_name,
        max_model_len=max_model_len,
        parent=state.model_name if is_adapter else None,
    )
