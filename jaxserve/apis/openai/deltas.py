"""Messages of chat completions: the deltas of a stream, and the message of a whole reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from jaxserve.apis.openai.chat_schema import (
    Delta,
    DeltaFunction,
    DeltaToolCall,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
)
from jaxserve.frontend.choice_stream import ParsedReply
from jaxserve.frontend.parsers.events import Event


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
