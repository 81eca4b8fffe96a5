"""From what a parser says to OpenAI's messages: deltas of a stream, and the message they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from jaxserve.apis.openai.chat_schema import (
    Delta,
    DeltaFunction,
    DeltaToolCall,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
)
from jaxserve.frontend.parsers.events import Event


class MessageDeltas:
    """The deltas of one choice, in order."""

    def __init__(self, new_call_id: Callable[[], str], *, shows_reasoning: bool) -> None:
        self._new_call_id = new_call_id
        self._shows_reasoning = shows_reasoning
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether a call was begun."""
        return self._num_calls > 0

    def of(self, events: Iterable[Event]) -> list[Delta]:
        """One delta for each event that a client sees."""
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


def message_of(deltas: Sequence[Delta]) -> ReplyMessage:
    """The message of a whole stream. Its content is null only beside tool calls."""
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(delta.reasoning or "" for delta in deltas)
    calls: list[ReplyToolCall] = []
    for delta in deltas:
        for call in delta.tool_calls or ():
            if call.id is not None:
                calls.append(ReplyToolCall(id=call.id, function=ReplyFunction(call.function.name or "", "")))
            calls[call.index].function.arguments += call.function.arguments or ""
    return ReplyMessage(
        "assistant",
        None if calls and not content else content,
        reasoning=reasoning or msgspec.UNSET,
        reasoning_content=reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )
