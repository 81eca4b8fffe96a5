"""From what a model writes to the items of a response, and the events that tell of them.

Plain and streamed replies go through here: the items are the same by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jaxserve.server.parsers.events import Event
from jaxserve.server.responses.open_items import OpenCall, OpenText
from jaxserve.server.schema.chat import ContentLogprob
from jaxserve.server.schema.response_events import ResponseEvent
from jaxserve.server.schema.response_items import ItemStatus, OutputItem


class OutputItems:
    """The output of one response, growing. Only its last item is open."""

    def __init__(self, new_call_id: Callable[[], str], numbers: Iterator[int], *, max_calls: int | None) -> None:
        """Calls beyond `max_calls` are left out. `numbers` are the sequence numbers of the response's events."""
        self._new_call_id = new_call_id
        self._numbers = numbers
        self._max_calls = max_calls
        self._num_calls = 0
        self._done: list[OutputItem] = []
        self._open: OpenText | OpenCall | None = None

    def take(self, news: Sequence[Event], logprobs: Sequence[ContentLogprob]) -> list[ResponseEvent]:
        """What comes next. The first text among it, or one of nothing, has the `logprobs`."""
        told: list[ResponseEvent] = []
        for event in news:
            if event.kind == "content":
                told += self._grow_text(event, logprobs)
                logprobs = ()
            elif event.kind == "reasoning":
                told += self._grow_text(event, ())
            elif event.kind == "name":
                told += self._begin_call(event.text)
            elif event.kind == "arguments" and isinstance(self._open, OpenCall):
                told += self._open.grow(event.text)
        if logprobs:
            told += self._grow_text(Event("content", "", ""), logprobs)
        return told

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """The end of the last item; a reply of nothing is an empty message."""
        told = [] if self._done or self._open else self._begin(OpenText("content", 0, self._numbers))
        return told + self._end(status)

    def items(self, status: ItemStatus) -> list[OutputItem]:
        """All items as they are by now, the open one with this status."""
        return self._done if self._open is None else [*self._done, self._open.item(status)]

    def _grow_text(self, event: Event, logprobs: Sequence[ContentLogprob]) -> list[ResponseEvent]:
        told: list[ResponseEvent] = []
        if not isinstance(self._open, OpenText) or self._open.kind != event.kind:
            told += self._end("completed")
            self._open = OpenText("content" if event.kind == "content" else "reasoning", len(self._done), self._numbers)
            told += self._open.begin()
        return told + self._open.grow(event.text, logprobs)

    def _begin_call(self, name: str) -> list[ResponseEvent]:
        told = self._end("completed")
        self._num_calls += 1
        if self._max_calls is None or self._num_calls <= self._max_calls:
            told += self._begin(OpenCall(name, self._new_call_id(), len(self._done), self._numbers))
        return told

    def _begin(self, item: OpenText | OpenCall) -> list[ResponseEvent]:
        self._open = item
        return item.begin()

    def _end(self, status: ItemStatus) -> list[ResponseEvent]:
        if self._open is None:
            return []
        told = self._open.end(status)
        self._done.append(self._open.item(status))
        self._open = None
        return told
