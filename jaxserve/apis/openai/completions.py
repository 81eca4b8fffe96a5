"""`POST /v1/completions`: a text, several texts, token ids, or several lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from jaxserve.tokenizer.tokenizer import Tokenizer


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
        constraint=body.constraint(None if body.response_format is None else response_constraint(body.response_format)),
        **shared_fields(body),
    )
    request.check(limits)
    return request


def _shown_ids(request: AddRequest) -> list[int]:
    """Return the ids of a prompt; none for one that was given as embeddings."""
    return [] if request.prompt_embeds else request.prompt_token_ids


@dataclass(frozen=True, slots=True)
class _Echo:
    """The text of a prompt at the beginning of a choice."""

    text: str
    num_added: int
    """Tokens at the beginning of the prompt that the text does not have: the tokenizer added them."""
    skip_special_tokens: bool
    """False: the text shows control tokens."""

    def offsets(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
        """Return the character at which each of the prompt's tokens begins."""
        shown = TextOffsets(tokenizer, skip_special_tokens=self.skip_special_tokens)
        return [0] * self.num_added + shown.push(token_ids[self.num_added :])


async def _echoes(
    frontend: Frontend, body: CompletionRequest, request: GenerationRequest, prompts: Sequence[list[int]]
) -> list[_Echo]:
    """Return the prompt of each choice; embeddings are never echoed."""
    assert isinstance(request.prompt, Texts), "completions continue texts"
    skips = request.skip_special_tokens
    tokens, adds = frontend.tokenization, request.prompt.add_special_tokens
    echoes = [
        _Echo(given, tokens.tokenizer.num_tokens_before_text if adds else 0, skip_special_tokens=False)
        if isinstance(given, str)
        else _Echo(await tokens.decode(ids, skip_special_tokens=skips), 0, skip_special_tokens=skips)
        for given, ids in zip(request.prompt.prompts, prompts, strict=True)
    ]
    return [echo for echo in echoes for _ in range(body.num_choices)]


class CompletionFormatter:
    """Chunks and replies of one request, all with the same id and time."""

    def __init__(
        self,
        body: CompletionRequest,
        frontend: Frontend,
        handle: RequestHandle | None,
        prompts: Sequence[list[int]],
        echoes: Sequence[_Echo],
    ) -> None:
        """`prompts`: token ids; `echoes`: each choice's prompt, if it is part of the reply."""
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
            TextOffsets(
                self._tokenizer,
                prompts[index // body.num_choices],
                skip_special_tokens=skip_special_tokens,
                start=len(echoes[index].text) if echoes else 0,
            )
            for index in range(len(prompts) * body.num_choices if body.logprobs is not None else 0)
        ]

    def opening(self) -> list[msgspec.Struct]:
        return [
            self._completion(
                [CompletionChoice(index, echo.text, None, None, prompt_token_ids=self._prompt_token_ids(index))],
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
                    text=(self._echoes[index].text if self._echoes else "") + "".join(delta.text for delta in deltas),
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
        index = deltas[0].index
        prompt = [token for delta in deltas for token in delta.prompt] if self._echoes else []
        tokens = [token for delta in deltas for token in delta.tokens]
        offsets = self._offsets[index].push([token.token_id for token in tokens])
        if prompt:
            offsets = [*self._echoes[index].offsets(self._tokenizer, [token.token_id for token in prompt]), *offsets]
        return completion_logprobs(self._tokenizer, [*prompt, *tokens], self._num_top, offsets)
