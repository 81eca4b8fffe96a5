"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

import msgspec
from aiohttp import web

from jaxserve.server.routes import Route
from jaxserve.server.schema.models import ModelCard, ModelList
from jaxserve.server.state import STATE, ServerState


async def list_models(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    return _reply(ModelList([_card(state, name) for name in state.model_names]))


async def show_model(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    name = request.match_info["name"]
    state.require_model(name)
    return _reply(_card(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    facts = state.client.facts
    max_model_len = facts.max_model_len if facts is not None else None
    return ModelCard(id=name, created=state.created, root=state.model_name, max_model_len=max_model_len)


def _reply(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


ROUTES = (
    Route("GET", "/v1/models", list_models),
    Route("GET", "/v1/models/{name:.+}", show_model),
)
