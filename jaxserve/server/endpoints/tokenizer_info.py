"""`GET /tokenizer_info`: what clients that write prompts themselves, such as lm-eval, want to know of the tokenizer."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.reply import json_reply
from jaxserve.server.routes import Route
from jaxserve.server.schema.tokenize import TokenizerInfo
from jaxserve.server.state import STATE


async def tokenizer_info(http: web.Request) -> web.StreamResponse:
    state = http.app[STATE]
    facts, tokenizer = state.client.require_ready(), state.tokenization.tokenizer
    named = tokenizer.named_tokens
    info = TokenizerInfo(
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        chat_template=tokenizer.chat_template_source,
        model_max_length=facts.max_model_len,
    )
    return json_reply(info)


ROUTES = (
    Route(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        summary="Special tokens, chat template and length limit.",
        tag="Tokens",
        reply=TokenizerInfo,
    ),
)
