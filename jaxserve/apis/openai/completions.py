"""`POST /v1/completions`: a text, several texts, token ids, or several lists of token ids."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from jaxserve.apis.openai.completions_schema import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    check_completion,
)
from jaxserve.apis.openai.logprobs import completion_logprobs, prompt_logprobs
from jaxserve.apis.routes import Route
from jaxserve.apis.schema.timing import RequestTiming
from jaxserve.apis.schema.usage import Usage, make_usage
from jaxserve.frontend.choice_stream import OutputDelta
from jaxserve.frontend.handle import Job, answer, answer_without_engine, grammar_of, make_job
from jaxserve.http.body import read_body
from jaxserve.http.sse import Framing
from jaxserve.http.state import STATE, ServerState
from jaxserve.ipc.messages import ModelInfo
from jaxserve.tokenizer.logprob_tokens import TextOffsets


@partial(
    Route,
    "POST",
    "/v1/completions",
    tag="OpenAI",
    request=CompletionRequest,
    reply=Completion,
    event=Completion,
    last_event="[DONE]",
)
async def completions(http: web.Request) -> web.StreamResponse:
    """The continuation of a text, of several texts, or of token ids."""
    state = http.app[STATE]
    request = await read_body(http, CompletionRequest)
    prompts = check_completion(request, state.limits)
    state.require_model(request.model)
    model_info = state.client.require_generation()
    with state.client.admission(len(prompts) * request.num_choices):
        token_ids = [await _encode(state, model_info, request, prompt) for prompt in prompts]
        echoes = None
        if request.echo:
            texts = [await _text(state, request, *pair) for pair in zip(prompts, token_ids, strict=True)]
            echoes = [text for text in texts for _ in range(request.num_choices)]
        job = None
        if not request.is_echo_only or request.num_prompt_logprobs is not None:
            job = make_job(
                state,
                model_info,
                request,
                token_ids,
                asked_max_tokens=request.max_tokens,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                num_top_logprobs=request.num_top_logprobs,
                words=await state.tokenization.encode_words(request),
                param="prompt",
                grammar=await grammar_of(state, request),
            )
        spelling = CompletionFormat(
            request,
            job,
            state,
            model_info,
            prompts=[ids for ids in token_ids for _ in range(request.num_choices)],
            echoes=echoes,
        )
        if job is not None:
            return await answer(http, request, job, spelling)
        pieces = [OutputDelta(index, "", finish_reason="length") for index in range(len(echoes or ()))]
        return await answer_without_engine(http, request, pieces, make_usage(sum(map(len, token_ids)), 0, 0), spelling)


async def _encode(
    state: ServerState, model_info: ModelInfo, request: CompletionRequest, prompt: str | list[int]
) -> list[int]:
    if isinstance(prompt, str):
        return await state.tokenization.encode(
            prompt,
            add_special_tokens=request.add_special_tokens is not False,
            max_tokens=model_info.max_model_len,
            param="prompt",
        )
    return state.tokenization.check_ids(prompt, model_info.vocab_size, model_info.max_model_len, "prompt")


async def _text(state: ServerState, request: CompletionRequest, prompt: str | list[int], token_ids: list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    skip_special_tokens = request.skip_special_tokens is not False
    return await state.tokenization.decode(token_ids, skip_special_tokens=skip_special_tokens)


class CompletionFormat:
    """Chunks and replies of one request, all with the same id and time."""

    def __init__(
        self,
        request: CompletionRequest,
        job: Job | None,
        state: ServerState,
        model_info: ModelInfo,
        *,
        prompts: list[list[int]],
        echoes: list[str] | None,
    ) -> None:
        self._request = request
        self._job = job
        self._tokenizer = state.tokenization.tokenizer
        self._heading = state.heading("cmpl", model_info, request.model)
        self._echoes = echoes
        self._no_usage = None if request.wants_usage else msgspec.UNSET
        skip_special_tokens = request.skip_special_tokens is not False
        self._offsets = [
            TextOffsets(self._tokenizer, () if request.echo else prompt, skip_special_tokens=skip_special_tokens)
            for prompt in (prompts if request.logprobs is not None else ())
        ]

    framing = Framing()

    def opening(self) -> list[msgspec.Struct]:
        return [
            self._completion([CompletionChoice(index, echo, None, None)], self._no_usage)
            for index, echo in enumerate(self._echoes or ())
        ]

    def chunks(self, piece: OutputDelta, usage: Usage | None) -> list[msgspec.Struct]:
        choice = CompletionChoice(
            piece.index, piece.text, self._logprobs([piece]), piece.finish_reason, piece.stop_reason
        )
        return [self._completion([choice], self._no_usage if usage is None else usage)]

    def closing(self, usage: Usage) -> list[msgspec.Struct]:
        if not self._request.wants_usage and not self._request.return_metrics:
            return []
        return [self._completion([], usage, self._timing())]

    def reply(self, choices: list[list[OutputDelta]], usage: Usage) -> msgspec.Struct:
        return self._completion(
            [
                CompletionChoice(
                    index=index,
                    text=(self._echoes[index] if self._echoes else "") + "".join(piece.text for piece in pieces),
                    logprobs=self._logprobs(pieces),
                    finish_reason=pieces[-1].finish_reason,
                    stop_reason=pieces[-1].stop_reason,
                    prompt_logprobs=prompt_logprobs(self._tokenizer, pieces[0].prompt, self._request.prompt_logprobs),
                )
                for index, pieces in enumerate(choices)
            ],
            usage,
            self._timing(),
        )

    def _timing(self) -> RequestTiming | msgspec.UnsetType:
        if self._job is not None:
            return self._job.told_timing(self._request)
        return RequestTiming() if self._request.return_metrics else msgspec.UNSET

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | msgspec.UnsetType | None,
        timing: RequestTiming | msgspec.UnsetType = msgspec.UNSET,
    ) -> Completion:
        return Completion(**self._heading, choices=choices, usage=usage, metrics=timing)

    def _logprobs(self, pieces: list[OutputDelta]) -> CompletionLogprobs | None:
        num_top = self._request.num_top_logprobs
        if num_top is None:
            return None
        tokens = [token for piece in pieces for token in (*(piece.prompt if self._request.echo else ()), *piece.tokens)]
        offsets = self._offsets[pieces[0].index]
        return completion_logprobs(self._tokenizer, tokens, num_top, offsets)
