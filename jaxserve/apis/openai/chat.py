"""`POST /v1/chat/completions`: endpoint, translation and reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec

from jaxserve.apis.openai.chat_schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    ChoiceLogprobs,
    Delta,
    DeltaFunction,
    DeltaToolCall,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
    check_chat,
)
from jaxserve.apis.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.apis.openai.response_format import response_constraint
from jaxserve.apis.routes import Call, Generated, Route
from jaxserve.apis.schema.common import heading, shared_fields
from jaxserve.apis.schema.usage import usage_of
from jaxserve.config import LimitsConfig
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.choices.parsed_reply import ParsedReply, parsed_reply
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.handle import RequestHandle, TokenCounts
from jaxserve.frontend.messages import ToolChoice, read_images, read_tools
from jaxserve.frontend.parsers.events import Event
from jaxserve.frontend.prepare import prepare
from jaxserve.frontend.request import Conversation, FieldNames, GenerationRequest

_NAMES_WITH_SWITCH: Final = FieldNames(thinking_budget="thinking.budget_tokens")
"""Names of the fields of a request without `thinking_token_budget`."""


@partial(
    Route,
    "POST",
    "/v1/chat/completions",
    tag="OpenAI",
    reply=ChatCompletion,
    event=ChatChunk,
    last_event="[DONE]",
)
async def chat_completions(call: Call, body: ChatRequest) -> Generated:
    """Generate the next message of a conversation."""
    request = await call.off_loop(to_request, body, call.frontend.limits)
    call.cleanup.enter_context(call.frontend.admitted(request))
    handle = call.cleanup.enter_context(await prepare(call.frontend, request))
    return Generated(
        handle=handle,
        formatter=ChatFormatter(body, handle, call.frontend),
        is_streamed=bool(body.stream),
        has_continuous_usage=body.wants_continuous_usage,
    )


def to_request(body: ChatRequest, limits: LimitsConfig) -> GenerationRequest:
    """Translate the request. Raises InvalidRequestError."""
    check_chat(body)
    shared = shared_fields(body)
    request = GenerationRequest(
        prompt=Conversation(
            messages=body.messages,
            functions=read_tools(body.tools),
            tool_choice=ToolChoice.read(body.tool_choice),
            is_parallel=body.parallel_tool_calls,
            reasoning_effort=body.reasoning_effort,
            thinking=body.thinking.is_on if body.thinking is not None else None,
            thinking_budget=body.reasoning_budget,
            names=FieldNames() if body.thinking_token_budget is not None else _NAMES_WITH_SWITCH,
            documents=body.documents,
            template_variables=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            images=read_images(body.messages),
        ),
        n=body.num_choices,
        max_tokens=body.output_limit,
        num_top_logprobs=body.top_logprobs or 0 if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        returns_routed_experts=bool(body.return_routed_experts),
        constraint=body.constraint(None if body.response_format is None else response_constraint(body.response_format)),
        prediction=body.prediction.text if body.prediction is not None else "",
        **shared,
    )
    request.check(limits)
    return request


class ChatFormatter:
    """Chunks and reply of one chat request, all with the same id and time."""

    def __init__(self, body: ChatRequest, handle: RequestHandle, frontend: Frontend) -> None:
        self._body = body
        self._handle = handle
        self._tokenizer = frontend.tokenization.tokenizer
        self._new_call_id = frontend.tokenization.output_format.new_call_id
        self._shows_reasoning = body.include_reasoning is not False
        self._messages = [
            MessageDeltas(self._new_call_id, shows_reasoning=self._shows_reasoning) for _ in range(body.num_choices)
        ]
        self._heading = heading("chatcmpl", frontend, handle.model_info, body.model)
        self._no_usage = None if body.wants_usage else msgspec.UNSET
        self._prompt_token_ids = handle.requests[0].prompt_token_ids if body.return_token_ids else msgspec.UNSET
        self._num_top = handle.requests[0].sampling.num_top_logprobs

    def opening(self) -> list[msgspec.Struct]:
        chunks = [
            self._chunk([ChatChunkChoice(index, Delta(role="assistant", content=""), None, None)], None)
            for index in range(self._body.num_choices)
        ]
        chunks[0].prompt_token_ids = self._prompt_token_ids
        return list(chunks)

    def chunks(self, delta: OutputDelta, counts: TokenCounts | None) -> list[msgspec.Struct]:
        message = self._messages[delta.index]
        if delta.events is not None:
            deltas = message.of(delta.events)
        else:
            deltas = [Delta(content=delta.text)] if delta.text else []
        is_end = delta.finish_reason is not None
        if (is_end and deltas and deltas[-1].tool_calls) or (
            not deltas and (is_end or delta.tokens or delta.token_ids)
        ):
            deltas.append(Delta())
        if not deltas:
            return []
        choices = [ChatChunkChoice(delta.index, one, None, None) for one in deltas]
        choices[-1].logprobs = self._logprobs([delta])
        choices[-1].token_ids = self._body.reported_ids([delta])
        if is_end:
            choices[-1].finish_reason = self._finish_reason(delta, has_calls=message.has_calls)
            choices[-1].stop_reason = delta.stop_reason
            choices[-1].routed_experts = self._body.reported_experts(delta)
        return [self._chunk([choice], counts) for choice in choices]

    def closing(self, counts: TokenCounts) -> list[msgspec.Struct]:
        if not self._body.wants_usage and not self._body.return_metrics:
            return []
        chunk = self._chunk([], counts)
        chunk.metrics = self._body.reported(self._handle.timing())
        return [chunk]

    def reply(self, choices: Sequence[Sequence[OutputDelta]], counts: TokenCounts) -> msgspec.Struct:
        replies = []
        for index, deltas in enumerate(choices):
            parsed, end = parsed_reply(deltas), deltas[-1]
            replies.append(
                ChatChoice(
                    index=index,
                    message=message_of(parsed, self._new_call_id, shows_reasoning=self._shows_reasoning),
                    logprobs=self._logprobs(deltas),
                    finish_reason=self._finish_reason(end, has_calls=bool(parsed.calls)),
                    stop_reason=end.stop_reason,
                    token_ids=self._body.reported_ids(deltas),
                    routed_experts=self._body.reported_experts(end),
                )
            )
        return ChatCompletion(
            **self._heading,
            choices=replies,
            usage=usage_of(counts),
            prompt_logprobs=prompt_logprobs(self._tokenizer, choices[0][0].prompt, self._body.prompt_logprobs),
            prompt_token_ids=self._prompt_token_ids,
            metrics=self._body.reported(self._handle.timing()),
        )

    def _chunk(self, choices: list[ChatChunkChoice], counts: TokenCounts | None) -> ChatChunk:
        return ChatChunk(**self._heading, choices=choices, usage=self._no_usage if counts is None else usage_of(counts))

    def _finish_reason(self, delta: OutputDelta, *, has_calls: bool) -> str:
        """Report the calls as the reason of a natural end, unless the request named the function."""
        is_named = ToolChoice.read(self._body.tool_choice).mode == "function"
        return (
            "tool_calls"
            if has_calls and not is_named and delta.finish_reason == "stop"
            else delta.finish_reason or "stop"
        )

    def _logprobs(self, deltas: Sequence[OutputDelta]) -> ChoiceLogprobs | None:
        if self._num_top is None:
            return None
        return chat_logprobs(self._tokenizer, [token for delta in deltas for token in delta.tokens], self._num_top)


class MessageDeltas:
    """The deltas of one choice, in order."""

    def __init__(self, new_call_id: Callable[[], str], *, shows_reasoning: bool) -> None:
        self._new_call_id = new_call_id
        self._shows_reasoning = shows_reasoning
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return self._num_calls > 0

    def of(self, events: Iterable[Event]) -> list[Delta]:
        """Return one delta for each event that clients see."""
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> Delta | None:
        if event.kind == "content":
            return Delta(content=event.text)
        if event.kind == "reasoning":
            return Delta(reasoning=event.text, reasoning_content=event.text) if self._shows_reasoning else None
        if event.kind == "syntax":
            return None
        self._num_calls += event.kind == "name"
        index = self._num_calls - 1
        if event.kind == "arguments":
            return Delta(tool_calls=[DeltaToolCall(index=index, function=DeltaFunction(arguments=event.text))])
        function = DeltaFunction(name=event.text, arguments="")
        call = DeltaToolCall(index=index, id=self._new_call_id(), type="function", function=function)
        return Delta(tool_calls=[call])


def message_of(reply: ParsedReply, new_call_id: Callable[[], str], *, shows_reasoning: bool) -> ReplyMessage:
    """Return the message of a whole reply. Its content is null only beside tool calls."""
    calls = [ReplyToolCall(id=new_call_id(), function=ReplyFunction(call.name, call.arguments)) for call in reply.calls]
    reasoning = (reply.reasoning if shows_reasoning else "") or msgspec.UNSET
    return ReplyMessage(
        "assistant",
        None if calls and not reply.content else reply.content,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or msgspec.UNSET,
    )
