"""`POST /v1/completions`: a text, several texts, token ids, or several lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from jaxserve.apis.openai.completions_schema import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    check_completion,
)
from jaxserve.apis.openai.logprobs import completion_logprobs, prompt_logprobs
from jaxserve.apis.openai.response_format import response_constraint
from jaxserve.apis.routes import Call, Computed, Generated, Route
from jaxserve.apis.schema.common import heading, shared_fields
from jaxserve.apis.schema.usage import Usage, usage_of
from jaxserve.config import LimitsConfig
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.encode import encode_request
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.handle import RequestHandle, RequestTiming, TokenCounts
from jaxserve.frontend.prepare import prepare
from jaxserve.frontend.request import GenerationRequest, Texts
from jaxserve.ipc.messages import AddRequest
from jaxserve.tokenizer.detokenizer import TextOffsets


@partial(
    Route,
    "POST",
    "/v1/completions",
    tag="OpenAI",
    reply=Completion,
    event=Completion,
    last_event="[DONE]",
)
async def completions(call: Call, body: CompletionRequest) -> Generated | Computed:
    """Continue a text, several texts, or token ids."""
    frontend, is_streamed = call.frontend, bool(body.stream)
    request = await call.off_loop(to_request, body, frontend.limits)
    call.cleanup.enter_context(frontend.admitted(request))
    handle = None
    prompts: Sequence[list[int]]
    if body.is_echo_only and body.num_prompt_logprobs is None and not body.return_routed_experts:
        encoded = await encode_request(frontend.tokenization, request, frontend.require_generation())
        prompts = encoded.prompts
    else:
        handle = await prepare(frontend, request)
        prompts = [_shown_ids(choice.request) for choice in handle.choices[:: request.n]]
    echoes = await _echoes(frontend, body, request, prompts) if body.echo else ()
    formatter = CompletionFormatter(body, frontend, handle, prompts, echoes)
    if handle is not None:
        return Generated(
            handle=call.cleanup.enter_context(handle),
            formatter=formatter,
            is_streamed=is_streamed,
            has_continuous_usage=body.wants_continuous_usage,
        )
    return Computed(
        deltas=[OutputDelta(index, "", finish_reason="length") for index in range(len(echoes))],
        counts=TokenCounts(sum(map(len, prompts))),
        formatter=formatter,
        is_streamed=is_streamed,
    )


def to_request(body: CompletionRequest, limits: LimitsConfig) -> GenerationRequest:
    """Translate the request. Raises InvalidRequestError."""
    prompts = check_completion(body, limits)
    request = GenerationRequest(
        prompt=Texts(prompts=prompts, add_special_tokens=body.add_special_tokens is not False),
        n=body.num_choices,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        is_limit_clipped=body.max_tokens is None,
        num_top_logprobs=body.logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        returns_routed_experts=bool(body.return_routed_experts),
        constraint=body.constraint(response_constraint(body.response_format)),
        **shared_fields(body),
    )
    request.check(limits)
    return request


def _shown_ids(request: AddRequest) -> list[int]:
    """Return the ids of a prompt; none for one that was given as embeddings."""
    return [] if request.prompt_embeds else request.prompt_token_ids


async def _echoes(
    frontend: Frontend, body: CompletionRequest, request: GenerationRequest, prompts: Sequence[list[int]]
) -> list[str]:
    """Return the text of each choice's prompt."""
    assert isinstance(request.prompt, Texts), "completions continue texts"
    texts = [
        given  # embeddings are never echoed
        if isinstance(given, str)
        else await frontend.tokenization.decode(ids, skip_special_tokens=request.skip_special_tokens)
        for given, ids in zip(request.prompt.prompts, prompts, strict=True)
    ]
    return [text for text in texts for _ in range(body.num_choices)]


class CompletionFormatter:
    """Chunks and replies of one request, all with the same id and time."""

    def __init__(
        self,
        body: CompletionRequest,
        frontend: Frontend,
        handle: RequestHandle | None,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
    ) -> None:
        """`prompts`: token ids; `echoes`: the text of each choice's prompt, if it is part of the reply."""
        self._body = body
        self._handle = handle
        self._tokenizer = frontend.tokenization.tokenizer
        self._heading = heading("cmpl", frontend, frontend.require_generation(), body.model)
        self._prompts = prompts
        self._with_prompt: set[int] = set()
        """Indices of the choices whose prompt's ids were returned."""
        self._echoes = echoes
        self._no_usage = None if body.wants_usage else msgspec.UNSET
        self._num_top = None if body.logprobs is None else len(body.logprob_token_ids or ()) or body.logprobs
        skip_special_tokens = body.skip_special_tokens is not False
        self._offsets = [
            TextOffsets(self._tokenizer, () if body.echo else prompt, skip_special_tokens=skip_special_tokens)
            for prompt in (prompts if body.logprobs is not None else ())
            for _ in range(body.num_choices)
        ]

    def opening(self) -> list[msgspec.Struct]:
        return [
            self._completion(
                [CompletionChoice(index, echo, None, None, prompt_token_ids=self._prompt_token_ids(index))],
                self._no_usage,
            )
            for index, echo in enumerate(self._echoes)
        ]

    def chunks(self, delta: OutputDelta, counts: TokenCounts | None) -> list[msgspec.Struct]:
        choice = CompletionChoice(
            delta.index,
            delta.text,
            self._logprobs([delta]),
            delta.finish_reason,
            delta.stop_reason,
            prompt_token_ids=self._prompt_token_ids(delta.index),
            token_ids=self._body.reported_ids([delta]),
            routed_experts=self._body.reported_experts(delta),
        )
        return [self._completion([choice], self._no_usage if counts is None else usage_of(counts))]

    def closing(self, counts: TokenCounts) -> list[msgspec.Struct]:
        if not self._body.wants_usage and not self._body.return_metrics:
            return []
        return [self._completion([], usage_of(counts), self._timing())]

    def reply(self, choices: Sequence[Sequence[OutputDelta]], counts: TokenCounts) -> msgspec.Struct:
        return self._completion(
            [
                CompletionChoice(
                    index=index,
                    text=(self._echoes[index] if self._echoes else "") + "".join(delta.text for delta in deltas),
                    logprobs=self._logprobs(deltas),
                    finish_reason=deltas[-1].finish_reason,
                    stop_reason=deltas[-1].stop_reason,
                    prompt_logprobs=prompt_logprobs(self._tokenizer, deltas[0].prompt, self._body.prompt_logprobs),
                    prompt_token_ids=self._prompt_token_ids(index),
                    token_ids=self._body.reported_ids(deltas),
                    routed_experts=self._body.reported_experts(deltas[-1]),
                )
                for index, deltas in enumerate(choices)
            ],
            usage_of(counts),
            self._timing(),
        )

    def _prompt_token_ids(self, index: int) -> list[int] | msgspec.UnsetType:
        """Return the ids of a choice's prompt the first time, if they were requested."""
        if not self._body.return_token_ids or index in self._with_prompt:
            return msgspec.UNSET
        self._with_prompt.add(index)
        return self._prompts[index // self._body.num_choices]

    def _timing(self) -> RequestTiming | msgspec.UnsetType:
        return self._body.reported(self._handle.timing() if self._handle is not None else RequestTiming())

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | msgspec.UnsetType | None,
        timing: RequestTiming | msgspec.UnsetType = msgspec.UNSET,
    ) -> Completion:
        return Completion(**self._heading, choices=choices, usage=usage, metrics=timing)

    def _logprobs(self, deltas: Sequence[OutputDelta]) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        tokens = [token for delta in deltas for token in (*(delta.prompt if self._body.echo else ()), *delta.tokens)]
        return completion_logprobs(self._tokenizer, tokens, self._num_top, self._offsets[deltas[0].index])
