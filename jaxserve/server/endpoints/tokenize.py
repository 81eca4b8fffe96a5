"""`POST /tokenize`: a prompt or a conversation to token ids."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.body import read_body
from jaxserve.server.conversation import encode_conversation
from jaxserve.server.reply import json_reply
from jaxserve.server.routes import Route
from jaxserve.server.schema.tokenize import TokenizeReply, TokenizeRequest, check_tokenize
from jaxserve.server.state import STATE


async def tokenize(http: web.Request) -> web.StreamResponse:
    state = http.app[STATE]
    request = await read_body(http, TokenizeRequest)
    check_tokenize(request, state.limits)
    state.require_model(request.model)
    facts = state.client.require_ready()
    if request.messages is not None:
        token_ids = await encode_conversation(
            state.tokenization, request.messages, request, max_tokens=state.max_body_size
        )
    else:
        token_ids = await state.tokenization.encode(
            request.prompt or "",
            add_special_tokens=request.add_special_tokens is not False,
            max_tokens=state.max_body_size,
            param="prompt",
        )
    strings = None
    if request.return_token_strs:
        strings = [state.tokenization.tokenizer.token_text(token_id) for token_id in token_ids]
    reply = TokenizeReply(count=len(token_ids), max_model_len=facts.max_model_len, tokens=token_ids, token_strs=strings)
    return json_reply(reply)


ROUTES = (
    Route(
        "POST",
        "/tokenize",
        tokenize,
        summary="The token ids of a text or of a conversation.",
        tag="Tokens",
        request=TokenizeRequest,
        reply=TokenizeReply,
    ),
)
