"""`POST /v1/score` and `POST /v1/rerank`: requests and replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from jaxserve.apis.openai.embeddings_schema import EmbeddingUsage, InputFields, check_fields
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid


class ScoreRequest(InputFields, kw_only=True):
    """How close texts are to each other, pair by pair."""

    text_1: Annotated[str | list[str], Bound("items", 1, "max_inputs")]
    """A text, or several."""
    text_2: Annotated[str | list[str], Bound("items", 1, "max_inputs")]
    """A text, or several. Where `text_1` is one, it is compared with each of these; else there are as many of both."""


class Score(msgspec.Struct, kw_only=True):
    object: str = "score"
    index: int
    """Which of the pairs it is of."""
    score: float
    """The cosine of the angle between the two vectors, -1 to 1; of a cross-encoder, what it says of the pair."""


class ScoreReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    """Seconds since 1970."""
    model: str
    data: list[Score]
    """In the order of the pairs."""
    usage: EmbeddingUsage


class Document(msgspec.Struct):
    text: str


class RerankRequest(InputFields, kw_only=True):
    """Which documents are closest to a query."""

    query: str
    """A text."""
    documents: Annotated[list[str | Document], Bound("items", 1, "max_inputs")]
    """Texts, bare or as objects."""
    top_n: Annotated[int | None, Bound("value", 1)] = None
    """How many of the best to tell; all if it is not given."""
    return_documents: bool | None = None
    """Whether results have the texts. They do if it is not given."""

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    """Which of the documents it is."""
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float
    """The cosine of the angle between the vectors of query and document, -1 to 1; of a cross-encoder, what it says."""


class RerankReply(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]
    """The best first."""


def check_score(request: ScoreRequest, limits: LimitsConfig) -> tuple[list[str], list[str]]:
    """Check what needs neither model nor tokenizer; returns both sides, one of which may be a single text."""
    check_fields(request, limits)
    first, second = ([side] if isinstance(side, str) else side for side in (request.text_1, request.text_2))
    _check_texts("text_1", first)
    _check_texts("text_2", second)
    check_partners(first, second)
    return first, second


def check_partners(first: Sequence[str], second: Sequence[str]) -> None:
    """Each of `second` has its partner in `first`, or the only one there."""
    if len(first) not in (1, len(second)):
        raise invalid("text_2", f"must be as many texts as 'text_1' ({len(first)}), got {len(second)}")


def check_rerank(request: RerankRequest, limits: LimitsConfig) -> None:
    """Check what needs neither model nor tokenizer."""
    check_fields(request, limits)
    _check_texts("query", [request.query])
    _check_texts("documents", request.texts)


def _check_texts(name: str, texts: list[str]) -> None:
    if not all(texts):
        raise invalid(name, "must not be empty")
