"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.apis.routes import Call, Route
from jaxserve.frontend.frontend import Frontend


class ModelCard(msgspec.Struct):
    id: str
    created: Annotated[int, Meta(description="Unix time of the server's start.")]
    root: Annotated[
        str,
        Meta(description="For the model, its name in replies; for an adapter, its hub id, or the name of its folder."),
    ]
    max_model_len: Annotated[
        int | None, Meta(description="Maximum of prompt and output tokens together; null while loading.")
    ]
    object: str = "model"
    owned_by: str = "jaxserve"
    parent: Annotated[str | None, Meta(description="For an adapter: its base model.")] = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


@partial(Route, "GET", "/v1/models", tag="OpenAI", reply=ModelList)
async def list_models(call: Call) -> ModelList:
    """List the names that requests may use."""
    return ModelList([_card(frontend, name) for frontend in call.models for name in frontend.names])


@partial(Route, "GET", "/v1/models/{name:.+}", tag="OpenAI", reply=ModelCard)
async def show_model(call: Call, name: str) -> ModelCard:
    """Show one of these names."""
    frontend = call.models.named(name)
    frontend.require_model(name)
    return _card(frontend, name)


def _card(frontend: Frontend, name: str) -> ModelCard:
    model_info = frontend.client.model_info
    is_adapter = name in frontend.adapters
    return ModelCard(
        id=name,
        created=frontend.created,
        root=shown_source(frontend.adapters[name]) if is_adapter else frontend.model_name,
        max_model_len=model_info.max_model_len if model_info is not None else None,
        parent=frontend.model_name if is_adapter else None,
    )


def shown_source(source: str) -> str:
    """Return a hub id as it is, and of a path on the server its last part."""
    is_hub_id = source.count("/") == 1 and source[0] not in "./~" and not Path(source).exists()
    return source if is_hub_id else Path(source).name
