"""`POST /v1/score`: how close texts are, pair by pair."""

from __future__ import annotations

import time
import uuid

from aiohttp import web

from jaxserve.server.body import read_body
from jaxserve.server.reply import json_reply
from jaxserve.server.request_id import adopt_request_id
from jaxserve.server.routes import Route
from jaxserve.server.schema.score import Score, ScoreReply, ScoreRequest, check_score
from jaxserve.server.scoring import answer_scores
from jaxserve.server.state import STATE


async def score(http: web.Request) -> web.StreamResponse:
    state = http.app[STATE]
    request = await read_body(http, ScoreRequest)
    adopt_request_id(http, request.request_id)
    first, second = check_score(request, state.limits)
    state.require_model(request.model)
    scores = await answer_scores(http, request, first, second, ("text_1", "text_2"))
    return json_reply(
        ScoreReply(
            id=f"score-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=state.model_name,
            data=[Score(index=i, score=value) for i, value in enumerate(scores.values)],
            usage=scores.usage,
        )
    )


ROUTES = tuple(
    Route("POST", path, score, summary=summary, tag="Scores", name=name, request=ScoreRequest, reply=ScoreReply)
    for path, name, summary in (
        ("/v1/score", "score", "How close texts are, pair by pair."),
        ("/score", "score_unversioned", "The same as /v1/score."),
    )
)
