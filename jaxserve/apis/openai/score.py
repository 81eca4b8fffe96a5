"""`POST /v1/score`: how close texts are, pair by pair."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial

from aiohttp import web

from jaxserve.apis.openai.score_schema import Score, ScoreReply, ScoreRequest, check_score
from jaxserve.apis.routes import Route
from jaxserve.frontend.scoring import answer_scores
from jaxserve.http.body import read_body
from jaxserve.http.reply import json_reply
from jaxserve.http.state import STATE


@partial(Route, "POST", "/v1/score", tag="Scores", request=ScoreRequest, reply=ScoreReply)
async def score(http: web.Request) -> web.StreamResponse:
    """How close texts are, pair by pair."""
    state = http.app[STATE]
    request = await read_body(http, ScoreRequest)
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


score_unversioned = replace(score, path="/score", name="score_unversioned", summary="The same as /v1/score.")
