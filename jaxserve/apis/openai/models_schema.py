"""`GET /v1/models`."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct):
    id: str
    created: int
    """When the server started, in seconds since 1970."""
    root: str
    """Of the model, the name that replies carry; of an adapter, where it was found."""
    max_model_len: int | None
    """Longest prompt and output together, in tokens; null while loading."""
    object: str = "model"
    owned_by: str = "jaxserve"
    parent: str | None = None
    """Of an adapter: the model that it adapts."""


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
