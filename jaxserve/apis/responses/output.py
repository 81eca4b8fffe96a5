"""From a model's output to the items of a response, and the events that describe them.

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
"""A log-probability and the number of characters of text up to the end of its token."""


class OutputItems:
    """The output of one response, growing. Only its last item is open."""

    def __init__(self, new_call_id: Callable[[], str], numbers: Iterator[int]) -> None:
        """`numbers` are the sequence numbers of the response's events."""
        self._new_call_id = new_call_id
        self._numbers = numbers
        self._num_chars = 0
        """Number of characters of all text so far."""
        self._done: list[OutputItem] = []
        self._open: OpenText | OpenCall | None = None

    def take(self, parsed: Sequence[Event], logprobs: Sequence[PlacedLogprob]) -> list[ResponseEvent]:
        """Return the response events of the next parser events and of the log-probabilities of their text's tokens."""
        found: list[ResponseEvent] = []
        waiting = deque(logprobs)
        for event in parsed:
            if event.kind == "content":
                self._num_chars += len(event.text)
                found += self._grow_text(event, self._take_placed(waiting))
            elif event.kind == "reasoning":
                found += self._add_logprobs(waiting)
                found += self._grow_text(event, [])
            elif event.kind == "name":
                found += self._add_logprobs(waiting)
                found += self._end("completed")
                found += self._begin(OpenCall(event.text, self._new_call_id(), len(self._done), self._numbers))
            elif event.kind == "arguments" and isinstance(self._open, OpenCall):
                found += self._open.grow(event.text)
        return found + self._add_logprobs(waiting)

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """Return the events that end the last item; an empty reply is an empty message."""
        begun = [] if self._done or self._open else self._begin(OpenText("content", 0, self._numbers))
        return begun + self._end(status)

    def items(self, status: ItemStatus) -> list[OutputItem]:
        """Return all items so far, the open one with this status."""
        return self._done if self._open is None else [*self._done, self._open.item(status)]

    def _take_placed(self, waiting: deque[PlacedLogprob]) -> list[ContentLogprob]:
        taken = []
        while waiting and waiting[0][1] <= self._num_chars:
            taken.append(waiting.popleft()[0])
        return taken

    def _add_logprobs(self, waiting: deque[PlacedLogprob]) -> list[ResponseEvent]:
        """Give the open message the log-probabilities of tokens whose text it already has."""
        takes_logprobs = self._open is None or self._open.kind == "content"
        placed = self._take_placed(waiting) if takes_logprobs else []
        return self._grow_text(Event("content", "", ""), placed) if placed else []

    def _grow_text(self, event: Event, logprobs: Sequence[ContentLogprob]) -> list[ResponseEvent]:
        if not isinstance(self._open, OpenText) or self._open.kind != event.kind:
            events = self._end("completed")
            item = OpenText("content" if event.kind == "content" else "reasoning", len(self._done), self._numbers)
            events += self._begin(item)
            return events + item.grow(event.text, logprobs)
        return self._open.grow(event.text, logprobs)

    def _begin(self, item: OpenText | OpenCall) -> list[ResponseEvent]:
        self._open = item
        return item.begin()

    def _end(self, status: ItemStatus) -> list[ResponseEvent]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self._done.append(self._open.item(status))
        self._open = None
        return events
