"""`POST /v1/score` and `POST /v1/rerank`: how close texts are, pair by pair, or documents to a query.

Reranking takes what Jina's and Cohere's clients send.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.apis.openai.embeddings import EmbeddingUsage, InputFields, check_fields
from jaxserve.apis.routes import Call, Encoded, Route
from jaxserve.apis.schema.common import UnixTime, version_header
from jaxserve.apis.schema.encode import encode_in_parts
from jaxserve.bounds import Bound
from jaxserve.errors import invalid
from jaxserve.frontend.embedding import check_partners, scores_with_counts


class PairFields(InputFields, kw_only=True):
    """Options for pairs of texts."""

    instruction: Annotated[
        str | None,
        Meta(
            description="What makes a document fit a query, for a reranker whose chat template shows a system message. Default: the checkpoint's default prompt, or that of the template."
        ),
    ] = None


class ScoreRequest(PairFields, kw_only=True):
    """Pairs of texts to score."""

    text_1: Annotated[str | list[str], Bound("items", 1, "max_inputs"), Meta(description="A text or a list of texts.")]
    text_2: Annotated[
        str | list[str],
        Bound("items", 1, "max_inputs"),
        Meta(
            description="A text or a list of texts. A single `text_1` is compared with each of them; otherwise both lists have the same length."
        ),
    ]


class Score(msgspec.Struct, kw_only=True):
    object: str = "score"
    index: Annotated[int, Meta(description="Index of the pair.")]
    score: Annotated[
        float,
        Meta(description="Cosine similarity of the two vectors, -1 to 1; for a cross-encoder, its score of the pair."),
    ]


class ScoreReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: UnixTime
    model: str
    data: Annotated[list[Score], Meta(description="Scores in the order of the pairs.")]
    usage: EmbeddingUsage


class Document(msgspec.Struct):
    text: str


class RerankRequest(PairFields, kw_only=True):
    """A query, and documents to order by their closeness to it."""

    query: Annotated[str, Meta(description="Query text.")]
    documents: Annotated[
        list[str | Document], Bound("items", 1, "max_inputs"), Meta(description="Texts to rank, as strings or objects.")
    ]
    top_n: Annotated[
        int | None, Bound("value", 1), Meta(description="Number of best results to return. Default: all.")
    ] = None
    return_documents: Annotated[
        bool | None, Meta(description="False: results do not contain the texts. Default: true.")
    ] = None

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RerankResult(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Index of the document.")]
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: Annotated[
        float,
        Meta(description="Cosine similarity of query and document, -1 to 1; for a cross-encoder, its score."),
    ]


class RerankReply(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: Annotated[list[RerankResult], Meta(description="Results, best first.")]


def check_score(request: ScoreRequest) -> tuple[list[str], list[str]]:
    """Check what needs neither model nor tokenizer; returns both sides, one of which may be a single text."""
    check_fields(request)
    first, second = ([side] if isinstance(side, str) else side for side in (request.text_1, request.text_2))
    _check_texts("text_1", first)
    _check_texts("text_2", second)
    check_partners(first, second)
    return first, second


def check_rerank(request: RerankRequest) -> list[str]:
    """Check what needs neither model nor tokenizer; returns the documents."""
    check_fields(request)
    texts = request.texts
    _check_texts("query", [request.query])
    _check_texts("documents", texts)
    return texts


def _check_texts(name: str, texts: list[str]) -> None:
    if not all(texts):
        raise invalid(name, "must not be empty")


@partial(Route, "POST", "/v1/score", tag="Scores", reply=ScoreReply)
async def score(call: Call, body: ScoreRequest) -> Encoded:
    """Score how close texts are, pair by pair."""
    first, second = await call.off_loop(check_score, body)
    scores, usage, headers = await _scores(call, body, first, second, ("text_1", "text_2"))
    reply = ScoreReply(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=call.frontend.model_name,
        data=[Score(index=i, score=value) for i, value in enumerate(scores)],
        usage=usage,
    )
    return Encoded(body=await asyncio.to_thread(encode_in_parts, reply), headers=headers)


score_unversioned = replace(score, path="/score", name="score_unversioned", summary="The same as /v1/score.")


@partial(Route, "POST", "/v1/rerank", tag="Scores", reply=RerankReply)
async def rerank(call: Call, body: RerankRequest) -> Encoded:
    """Order documents by their closeness to a query."""
    texts = await call.off_loop(check_rerank, body)
    scores, usage, headers = await _scores(call, body, [body.query], texts, ("query", "documents"))
    best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
    shows_texts = body.return_documents is not False
    results = [
        RerankResult(
            index=i,
            document=Document(texts[i]) if shows_texts else msgspec.UNSET,
            relevance_score=scores[i],
        )
        for i in best
    ]
    reply = RerankReply(id=f"rerank-{uuid.uuid4().hex}", model=call.frontend.model_name, usage=usage, results=results)
    return Encoded(body=await asyncio.to_thread(encode_in_parts, reply), headers=headers)


rerank_v2 = replace(
    rerank, path="/v2/rerank", name="rerank_v2", summary="The same as /v1/rerank, where Cohere's clients look for it."
)
rerank_unversioned = replace(rerank, path="/rerank", name="rerank_unversioned", summary="The same as /v1/rerank.")


async def _scores(
    call: Call, body: PairFields, first: list[str], second: list[str], params: tuple[str, str]
) -> tuple[list[float], EmbeddingUsage, dict[str, str]]:
    call.frontend.require_model(body.model)
    scores, num_tokens, weight_version = await scores_with_counts(
        call.frontend,
        first,
        second,
        truncate=body.truncate_prompt_tokens,
        priority=body.priority,
        params=params,
        instruction=body.instruction,
    )
    return scores, EmbeddingUsage(num_tokens, num_tokens), version_header(weight_version)
