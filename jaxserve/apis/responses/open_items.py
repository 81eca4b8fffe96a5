"""Items of a response while they are generated, with the events of their beginning, growth and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxserve.apis.openai.chat_schema import ContentLogprob
from jaxserve.apis.responses import events
from jaxserve.apis.responses.events import ResponseEvent
from jaxserve.apis.responses.input import new_id
from jaxserve.apis.responses.items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)


class OpenText:
    """A message or a part of reasoning."""

    def __init__(self, kind: Literal["content", "reasoning"], output_index: int, numbers: Iterator[int]) -> None:
        """`numbers` are the sequence numbers of the response's events."""
        self.kind = kind
        self._id = new_id("msg" if kind == "content" else "rs")
        self._place: dict[str, Any] = {"item_id": self._id, "output_index": output_index, "content_index": 0}
        self._numbers = numbers
        self._texts: list[str] = []
        self._logprobs: list[ContentLogprob] = []

    def begin(self) -> list[ResponseEvent]:
        empty = self._item([], "in_progress")
        added = events.OutputItemAdded(empty, self._place["output_index"], next(self._numbers))
        return [added, events.ContentPartAdded(self._part(), **self._place, sequence_number=next(self._numbers))]

    def grow(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> list[ResponseEvent]:
        self._texts.append(text)
        self._logprobs += logprobs
        number = next(self._numbers)
        if self.kind == "content":
            return [events.OutputTextDelta(text, list(logprobs), **self._place, sequence_number=number)]
        return [events.ReasoningTextDelta(text, **self._place, sequence_number=number)]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        part, place, numbers = self._part(), self._place, self._numbers
        done: ResponseEvent
        if isinstance(part, OutputText):
            done = events.OutputTextDone(part.text, part.logprobs, **place, sequence_number=next(numbers))
        else:
            done = events.ReasoningTextDone(part.text, **place, sequence_number=next(numbers))
        return [
            done,
            events.ContentPartDone(part, **place, sequence_number=next(numbers)),
            events.OutputItemDone(self.item(status), place["output_index"], next(numbers)),
        ]

    def item(self, status: ItemStatus) -> MessageItem | ReasoningItem:
        """Return the item with its text so far."""
        return self._item([self._part()], status)

    def _part(self) -> OutputText | ReasoningText:
        text = "".join(self._texts)
        return OutputText(text=text, logprobs=[*self._logprobs]) if self.kind == "content" else ReasoningText(text)

    def _item(self, parts: list[Any], status: ItemStatus) -> MessageItem | ReasoningItem:
        if self.kind == "content":
            return MessageItem(id=self._id, role="assistant", content=parts, status=status)
        return ReasoningItem(id=self._id, content=parts, status=status)


class OpenCall:
    """A function call."""

    kind: Literal["call"] = "call"

    def __init__(self, name: str, call_id: str, output_index: int, numbers: Iterator[int]) -> None:
        """`numbers` are the sequence numbers of the response's events."""
        self._id = new_id("fc")
        self._name = name
        self._call_id = call_id
        self._place: dict[str, Any] = {"item_id": self._id, "output_index": output_index}
        self._numbers = numbers
        self._texts: list[str] = []

    def begin(self) -> list[ResponseEvent]:
        return [
            events.OutputItemAdded(self.item("in_progress"), self._place["output_index"], next(self._numbers)),
        ]

    def grow(self, text: str) -> list[ResponseEvent]:
        self._texts.append(text)
        return [events.FunctionArgumentsDelta(text, **self._place, sequence_number=next(self._numbers))]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        item, numbers = self.item(status), self._numbers
        return [
            events.FunctionArgumentsDone(item.name, item.arguments, **self._place, sequence_number=next(numbers)),
            events.OutputItemDone(item, self._place["output_index"], next(numbers)),
        ]

    def item(self, status: ItemStatus) -> FunctionCallItem:
        """Return the item with its text so far."""
        return FunctionCallItem(
            id=self._id, call_id=self._call_id, name=self._name, arguments="".join(self._texts), status=status
        )
