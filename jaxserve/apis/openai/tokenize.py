"""For clients that write prompts themselves, such as lm-eval: token ids, texts, and what there is to know of the tokenizer."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from jaxserve.apis.openai.tokenize_schema import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
    check_tokenize,
)
from jaxserve.apis.routes import Route
from jaxserve.frontend.checks import check_token_ids
from jaxserve.frontend.request import encode_conversation
from jaxserve.http.body import read_body
from jaxserve.http.reply import json_reply
from jaxserve.http.state import STATE


@partial(Route, "POST", "/tokenize", tag="Tokens", request=TokenizeRequest, reply=TokenizeReply)
async def tokenize(http: web.Request) -> web.StreamResponse:
    """The token ids of a text or of a conversation."""
    state = http.app[STATE]
    request = await read_body(http, TokenizeRequest)
    check_tokenize(request, state.limits)
    state.require_model(request.model)
    model_info = state.client.require_ready()
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
    reply = TokenizeReply(
        count=len(token_ids), max_model_len=model_info.max_model_len, tokens=token_ids, token_strs=strings
    )
    return json_reply(reply)


@partial(Route, "POST", "/detokenize", tag="Tokens", request=DetokenizeRequest, reply=DetokenizeReply)
async def detokenize(http: web.Request) -> web.StreamResponse:
    """The text of token ids."""
    state = http.app[STATE]
    request = await read_body(http, DetokenizeRequest)
    state.require_model(request.model)
    model_info = state.client.require_ready()
    check_token_ids("tokens", request.tokens, model_info.vocab_size)
    text = await state.tokenization.decode(request.tokens, skip_special_tokens=False)
    return json_reply(DetokenizeReply(text))


@partial(Route, "GET", "/tokenizer_info", tag="Tokens", reply=TokenizerInfo)
async def tokenizer_info(http: web.Request) -> web.StreamResponse:
    """Special tokens, chat template and length limit."""
    state = http.app[STATE]
    model_info, tokenizer = state.client.require_ready(), state.tokenization.tokenizer
    named = tokenizer.named_tokens
    info = TokenizerInfo(
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        chat_template=tokenizer.chat_template_source,
        model_max_length=model_info.max_model_len,
    )
    return json_reply(info)
