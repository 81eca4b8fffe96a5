"""The collaborators that requests need, without HTTP: one set per API process or `LLM`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from jaxserve.config import ImagesConfig, LimitsConfig
from jaxserve.errors import InvalidRequestError, ModelNotFoundError
from jaxserve.frontend.adapters import AdapterNames
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.grammar_checker import GrammarChecker
from jaxserve.frontend.images.loader import ImageLoader
from jaxserve.frontend.reply_budget import ReplyBudget
from jaxserve.frontend.request import GenerationRequest
from jaxserve.frontend.sampling import SeedStream
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.ipc.messages import EmbeddingInfo, ModelInfo
from jaxserve.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """From requests to the engine and back. Made once; none of its fields is replaced."""

    model_names: tuple[str, ...]
    """Names of the model; replies show the first."""
    adapters: AdapterNames = field(default_factory=AdapterNames)
    """Names of adapters and their sources; the engine may load and unload them."""
    client: EngineClient
    tokenization: Tokenization
    metrics: Metrics
    seeds: SeedStream
    grammars: GrammarChecker
    limits: LimitsConfig
    images: ImageLoader = field(default_factory=lambda: ImageLoader(ImagesConfig()))
    replies: ReplyBudget = field(default_factory=ReplyBudget)
    """Memory of replies; unlimited by default."""
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

    def require_generation(self, name: str | None = None) -> ModelInfo:
        """Return the info of a model that generates and has this name. Raises RequestError."""
        self.require_model(name)
        model_info = self.client.require_ready()
        if model_info.embedding is not None:
            raise InvalidRequestError(
                "This server embeds texts (/v1/embeddings, /v1/score, /v1/rerank); its model does not generate.",
                code="unsupported_task",
            )
        return model_info

    def require_embedding(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """Return the info of a model that embeds. Raises RequestError."""
        model_info = self.client.require_ready()
        if model_info.embedding is None:
            raise InvalidRequestError(
                "This server generates text; embeddings and scores need one that was started with `--task embed`.",
                code="unsupported_task",
            )
        return model_info, model_info.embedding

    def require_vectors(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """Return the info of a model that makes vectors of texts. Raises RequestError, also if it only scores pairs."""
        model_info, model = self.require_embedding()
        if model.scores_pairs:
            raise InvalidRequestError(
                "This server's model is a cross-encoder: it scores pairs (/v1/score, /v1/rerank) and makes no vectors.",
                code="unsupported_task",
            )
        return model_info, model

    def admitted(self, request: GenerationRequest) -> AbstractContextManager[None]:
        """Return the places of a request in the queue. Raises RequestError if it cannot be served, or not now."""
        self.require_generation(request.model)
        return self.client.admission.places(request.num_sequences)

    def adapter_of(self, name: str | None) -> int:
        """Return the number of the adapter of this name; 0 for the model without one."""
        return 0 if name is None or name not in self.adapters else self.adapters.number(name)

    def shown_name(self, name: str | None) -> str:
        """Return the name that replies show for the model that a request names."""
        return name if name is not None and name in self.adapters else self.model_name
