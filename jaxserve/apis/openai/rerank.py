"""`POST /v1/rerank`: documents in the order of how close they are to a query, as Jina's and Cohere's clients ask for it."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial

import msgspec
from aiohttp import web

from jaxserve.apis.openai.score_schema import Document, RerankReply, RerankRequest, RerankResult, check_rerank
from jaxserve.apis.routes import Route
from jaxserve.frontend.scoring import answer_scores
from jaxserve.http.body import read_body
from jaxserve.http.reply import json_reply
from jaxserve.http.state import STATE


@partial(Route, "POST", "/v1/rerank", tag="Scores", request=RerankRequest, reply=RerankReply)
async def rerank(http: web.Request) -> web.StreamResponse:
    """Documents, the closest to a query first."""
    state = http.app[STATE]
    request = await read_body(http, RerankRequest)
    check_rerank(request, state.limits)
    state.require_model(request.model)
    texts = request.texts
    scores = await answer_scores(http, request, [request.query], texts, ("query", "documents"))
    best = sorted(range(len(texts)), key=lambda i: -scores.values[i])[: request.top_n]
    shows_texts = request.return_documents is not False
    results = [
        RerankResult(
            index=i,
            document=Document(texts[i]) if shows_texts else msgspec.UNSET,
            relevance_score=scores.values[i],
        )
        for i in best
    ]
    reply = RerankReply(id=f"rerank-{uuid.uuid4().hex}", model=state.model_name, usage=scores.usage, results=results)
    return json_reply(reply)


rerank_v2 = replace(
    rerank, path="/v2/rerank", name="rerank_v2", summary="The same as /v1/rerank, where Cohere's clients look for it."
)
rerank_unversioned = replace(rerank, path="/rerank", name="rerank_unversioned", summary="The same as /v1/rerank.")
