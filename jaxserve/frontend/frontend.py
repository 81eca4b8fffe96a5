"""The collaborators that requests need, without HTTP: one set per API process or `LLM`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
    started_s: float = field(default_factory=time.monotonic)
    """Start of this process on the monotonic clock."""

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use: those of the model and of its adapters."""
        return (*self.model_names, *self.adapters)

    def require_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for a model that is not served. None: the request names no model."""
        if name is not None and name not in self.names:
            raise _not_found(name, self.names)

    def require_generation(self, name: str | None = None) -> ModelInfo:
        """Return the info of a model that generates and has this name. Raises RequestError."""
        self.require_model(name)
        model_info = self.client.require_ready()
        if model_info.embedding is not None:
            raise InvalidRequestError(
                f"The model `{self.model_name}` embeds texts (/v1/embeddings, /v1/score, /v1/rerank) and does not generate.",
                code="unsupported_task",
            )
        return model_info

    def require_embedding(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """Return the info of a model that embeds. Raises RequestError."""
        model_info = self.client.require_ready()
        if model_info.embedding is None:
            raise InvalidRequestError(
                f"The model `{self.model_name}` generates text. To serve it beside one that embeds, start "
                f"`jaxserve serve --model {self.model_name}=MODEL --model vectors=sentence-transformers/all-MiniLM-L6-v2`; to make "
                "vectors with it instead, `jaxserve serve MODEL --task embed`. MODEL is what this server was started with (`default`: the default model).",
                code="unsupported_task",
            )
        return model_info, model_info.embedding

    def require_vectors(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """Return the info of a model that makes vectors of texts. Raises RequestError, also for a head that gives labels."""
        model_info, model = self.require_embedding()
        if model.scores_pairs:
            raise self._wrong_head("a cross-encoder: it scores pairs (/v1/score, /v1/rerank) and makes no vectors")
        if model.labels:
            raise self._wrong_head("a classifier: it labels texts (/classify) and makes no vectors")
        return model_info, model

    def require_scores(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """Return the info of a model that scores pairs of texts. Raises RequestError, also for a classifier."""
        model_info, model = self.require_embedding()
        if len(model.labels) > 1:
            raise self._wrong_head(f"a classifier of {len(model.labels)} labels (/classify): it gives no score")
        return model_info, model

    def require_labels(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """Return the info of a model that labels texts. Raises RequestError, also if it makes vectors."""
        model_info, model = self.require_embedding()
        if not model.labels:
            raise self._wrong_head("no classifier: it makes vectors of texts (/v1/embeddings)")
        return model_info, model

    def _wrong_head(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"The model `{self.model_name}` is {what}.", code="unsupported_task")

    def admitted(self, request: GenerationRequest) -> AbstractContextManager[None]:
        """Return the places of a request in the queue. Raises RequestError if it cannot be served, or not now."""
        self.require_generation(request.model)
        return self.client.admission.places(request.num_sequences)

    def adapter_of(self, name: str | None) -> int:
        """Return the number of the adapter of this name; 0 for the model without one.

        Raises ModelNotFoundError for another name: that of an adapter that was unloaded since the request was admitted.
        """
        self.require_model(name)
        return 0 if name is None or name not in self.adapters else self.adapters.number(name)

    def shown_name(self, name: str | None) -> str:
        """Return the name that replies show for the model that a request names."""
        return name if name is not None and name in self.adapters else self.model_name


class ServedModels:
    """The models of one server, with an engine and a frontend each. Requests that name none get the first."""

    def __init__(self, frontends: Sequence[Frontend]) -> None:
        self._frontends = tuple(frontends)

    def __iter__(self) -> Iterator[Frontend]:
        return iter(self._frontends)

    @property
    def first(self) -> Frontend:
        """The frontend of the first model; its metrics are those of the process as well."""
        return self._frontends[0]

    @property
    def are_several(self) -> bool:
        return len(self._frontends) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return tuple(name for frontend in self for name in frontend.names)

    def named(self, name: str | None) -> Frontend:
        """Return the frontend of the model, or of the model of the adapter, with this name.

        Raises ModelNotFoundError if several are served and none has the name; a single frontend checks names itself.
        """
        if name is None or not self.are_several:
            return self.first
        for frontend in self:
            if name in frontend.names:
                return frontend
        raise _not_found(name, self.names)

    def commanded(self, name: str | None) -> Frontend:
        """Return the frontend of the model that a command of the operator is for. Raises RequestError.

        A command must name the model if several are served: a default would put the wrong one to sleep.
        """
        if name is None and self.are_several:
            names = ", ".join(frontend.model_name for frontend in self)
            raise InvalidRequestError(
                f"Several models are served: say which one with ?model=NAME in the URL ({names}).", param="model"
            )
        frontend = self.named(name)
        frontend.require_model(name)
        return frontend


def _not_found(name: str, names: Sequence[str]) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"The model `{shorten(name)[1:-1]}` does not exist. Served here: {', '.join(names)}.", param="model"
    )
