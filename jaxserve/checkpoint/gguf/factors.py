"""GGUF files whose weights are multiplied with factors that the model applies to activations (Falcon-H1).

The files do not have the factors, so weights of safetensors and of adapters, which are not multiplied, do not fit theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxserve.errors import CheckpointError

MULTIPLIED: Final = "has_multiplied_weights"
"""Key of `config.json` as it would be for such a file."""


def check_not_multiplied(config: Mapping[str, Any], weights: str) -> None:
    """Raise CheckpointError if `weights`, which are not multiplied, are for a model whose weights are. config: the model's."""
    if config.get(MULTIPLIED):
        raise CheckpointError(
            f"{weights}: expected a model from safetensors, found one from a GGUF file whose weights are multiplied "
            "with factors that these lack"
        )
