"""`POST /detokenize`: token ids to text."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.body import read_body
from jaxserve.server.reply import json_reply
from jaxserve.server.routes import Route
from jaxserve.server.schema.checks import check_token_ids
from jaxserve.server.schema.tokenize import DetokenizeReply, DetokenizeRequest
from jaxserve.server.state import STATE


async def detokenize(http: web.Request) -> web.StreamResponse:
    state = http.app[STATE]
    request = await read_body(http, DetokenizeRequest)
    state.require_model(request.model)
    facts = state.client.require_ready()
    check_token_ids("tokens", request.tokens, facts.vocab_size)
    text = await state.tokenization.decode(request.tokens, skip_special_tokens=False)
    return json_reply(DetokenizeReply(text))


ROUTES = (
    Route(
        "POST",
        "/detokenize",
        detokenize,
        summary="The text of token ids.",
        tag="Tokens",
        request=DetokenizeRequest,
        reply=DetokenizeReply,
    ),
)
