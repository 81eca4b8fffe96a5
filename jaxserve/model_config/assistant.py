"""The inputs and the vocabulary of a drafter of Gemma 4, beside its layers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.model_config.cache import LayerPlaces


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """A drafter whose layers attend to the keys and values of the model that it drafts for."""

    hidden_size: int  # E
    """Width of the model's hidden states."""
    num_centroids: int | None = None  # C
    """Clusters of the vocabulary, of equal size; None: logits are those of all tokens."""
    num_active: int = 0
    """Clusters of which logits are computed."""
    places: tuple[LayerPlaces, ...] = ()
    """Places in the model's cache that its layers read; none before the model is known."""
