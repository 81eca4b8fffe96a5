"""From what a model writes to the items of a response, and the events that tell of them.

Plain and streamed replies go through here: the items are the same by construction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jaxserve.apis.openai.chat_schema import ContentLogprob
from jaxserve.apis.responses.events import ResponseEvent
from jaxserve.apis.responses.items import ItemStatus, OutputItem
from jaxserve.apis.responses.open_items import OpenCall, OpenText
from jaxserve.frontend.parsers.events import Event

PlacedLogprob = tuple[ContentLogprob, int]
"""With the characters of text up to the end of its token."""


class OutputItems:
    """The output of one response, growing. Only its last item is open."""

    def __init__(self, new_call_id: Callable[[], str], numbers: Iterator[int]) -> None:
        """`numbers` are the sequence numbers of the response's events."""
        self._new_call_id = new_call_id
        self._numbers = numbers
        self._num_chars = 0
        """Of all text so far."""
        self._done: list[OutputItem] = []
        self._open: OpenText | OpenCall | None = None

    def take(self, news: Sequence[Event], logprobs: Sequence[PlacedLogprob]) -> list[ResponseEvent]:
        """What comes next, and the log-probabilities of the tokens of its text, each with the text's end."""
        told: list[ResponseEvent] = []
        waiting = deque(logprobs)
        for event in news:
            if event.kind == "content":
                self._num_chars += len(event.text)
                told += self._grow_text(event, self._those_up_to_here(waiting))
            elif event.kind == "reasoning":
                told += self._grow_text(event, [])
            elif event.kind == "name":
                told += self._end("completed")
                told += self._begin(OpenCall(event.text, self._new_call_id(), len(self._done), self._numbers))
            elif event.kind == "arguments" and isinstance(self._open, OpenCall):
                told += self._open.grow(event.text)
        if waiting:
            told += self._grow_text(Event("content", "", ""), self._those_up_to_here(waiting))
        return told

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """The end of the last item; a reply of nothing is an empty message."""
        told = [] if self._done or self._open else self._begin(OpenText("content", 0, self._numbers))
        return told + self._end(status)

    def items(self, status: ItemStatus) -> list[OutputItem]:
        """All items as they are by now, the open one with this status."""
        return self._done if self._open is None else [*self._done, self._open.item(status)]

    def _those_up_to_here(self, waiting: deque[PlacedLogprob]) -> list[ContentLogprob]:
        taken = []
        while waiting and waiting[0][1] <= self._num_chars:
            taken.append(waiting.popleft()[0])
        return taken

    def _grow_text(self, event: Event, logprobs: Sequence[ContentLogprob]) -> list[ResponseEvent]:
        if not isinstance(self._open, OpenText) or self._open.kind != event.kind:
            told = self._end("completed")
            item = OpenText("content" if event.kind == "content" else "reasoning", len(self._done), self._numbers)
            told += self._begin(item)
            return told + item.grow(event.text, logprobs)
        return self._open.grow(event.text, logprobs)

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
