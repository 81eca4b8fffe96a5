"""The collaborators that requests need, without HTTP: one set per API process or `LLM`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.config import LimitsConfig
from jaxserve.errors import ModelNotFoundError
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.grammar_checker import GrammarChecker
from jaxserve.frontend.seeds import SeedStream
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.ipc.messages import ModelInfo
from jaxserve.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """From requests to the engine and back. Made once; none of its fields is replaced."""

    model_names: tuple[str, ...]
    """Names of the model; replies show the first."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Names of adapters and their sources, in the order in which the engine counts them from 1."""
    client: EngineClient
    tokenization: Tokenization
    metrics: Metrics
    seeds: SeedStream
    grammars: GrammarChecker
    limits: LimitsConfig
    created: int = field(default_factory=lambda: int(time.time()))
    """Start of this process, in Unix time."""

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def require_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for a model that is not served. None: the request names no model."""
        names = (*self.model_names, *self.adapters)
        if name is not None and name not in names:
            raise ModelNotFoundError(
                f"The model `{shorten(name)[1:-1]}` does not exist. Served here: {', '.join(names)}.",
                param="model",
            )

    def require_generation(self, name: str | None) -> ModelInfo:
        """Return the info of a model that generates and has this name. Raises RequestError."""
        self.require_model(name)
        return self.client.require_generation()

    def adapter_of(self, name: str | None) -> int:
        """Return the number of the adapter of this name; 0 for the model without one."""
        return 0 if name is None or name not in self.adapters else 1 + list(self.adapters).index(name)

    def shown_name(self, name: str | None) -> str:
        """Return the name that replies show for the model that a request names."""
        return name if name is not None and name in self.adapters else self.model_name
