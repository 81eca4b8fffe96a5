"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid

import msgspec
from aiohttp import web

from jaxserve.server.body import read_body
from jaxserve.server.generation import answer, make_job
from jaxserve.server.logprobs import chat_logprobs
from jaxserve.server.request_id import adopt_request_id
from jaxserve.server.routes import Route
from jaxserve.server.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    Delta,
    ReplyMessage,
    check_chat,
    template_messages,
)
from jaxserve.server.schema.usage import Usage
from jaxserve.server.state import STATE
from jaxserve.server.stream import Piece
from jaxserve.tokenizer.tokenizer import Tokenizer


async def chat_completions(http: web.Request) -> web.StreamResponse:
    state = http.app[STATE]
    request = await read_body(http, ChatRequest)
    adopt_request_id(http, request.request_id)
    check_chat(request)
    state.require_model(request.model)
    facts = state.client.require_ready()
    with state.client.admission(request.num_choices):
        prompt = await state.tokenization.encode_chat(
            template_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt is not False,
            template_variables=request.chat_template_kwargs,
            max_tokens=facts.max_model_len,
        )
        job = make_job(
            state,
            facts,
            request,
            [prompt],
            asked_max_tokens=request.output_limit,
            default_max_tokens=None,
            num_top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            bad_words=await state.tokenization.encode_bad_words(request.bad_words),
            param="messages",
        )
        spelling = ChatFormat(request, state.model_name, state.fingerprint(facts), state.tokenization.tokenizer)
        return await answer(http, request, job, spelling)


class ChatFormat:
    """Chunks and replies of one chat request, all with the same id and time."""

    def __init__(self, request: ChatRequest, model: str, fingerprint: str, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = fingerprint
        self._no_usage = None if request.wants_usage else msgspec.UNSET

    def opening(self) -> list[msgspec.Struct]:
        return [
            self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""), None, None)], None)
            for index in range(self._request.num_choices)
        ]

    def chunk(self, piece: Piece, usage: Usage | None) -> msgspec.Struct:
        choice = ChatChunkChoice(
            piece.index, Delta(content=piece.text or None), self._logprobs([piece]), piece.finish_reason
        )
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        return self._chunk([choice], usage)

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return self._chunk([], usage)

    def reply(self, choices: list[list[Piece]], usage: Usage) -> msgspec.Struct:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=ReplyMessage("assistant", "".join(piece.text for piece in pieces)),
                    logprobs=self._logprobs(pieces),
                    finish_reason=pieces[-1].finish_reason or "stop",
                    stop_reason=pieces[-1].stop_reason,
                )
                for index, pieces in enumerate(choices)
            ],
            usage=usage,
            system_fingerprint=self._fingerprint,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=self._no_usage if usage is None else usage,
        )

    def _logprobs(self, pieces: list[Piece]) -> ChoiceLogprobs | None:
        if not self._request.logprobs:
            return None
        tokens = [token for piece in pieces for token in piece.tokens]
        return chat_logprobs(self._tokenizer, tokens, self._request.top_logprobs or 0)


ROUTES = (Route("POST", "/v1/chat/completions", chat_completions),)
