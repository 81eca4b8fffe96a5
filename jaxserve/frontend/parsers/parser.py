"""Incremental parser of one reply: text in, events out."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.frontend.parsers.events import Event, merged
from jaxserve.frontend.parsers.scanner import Reading, Scanner, show, stops


class OutputParser:
    """Feeds the text of one reply to a reader. Not thread-safe; one per sequence."""

    def __init__(self, read: Callable[[Scanner], Reading[None]], prefill: str = "") -> None:
        """prefill: text of the reply that the prompt has already written; it makes no events."""
        self._scanner = Scanner()
        self._reading = self._read_all(read)
        self.has_begun_call = any(event.kind == "name" for event in self.feed(prefill))
        """True if the prompt ends inside or after a call."""
        self._scanner.forget_draft()

    @property
    def is_reasoning(self) -> bool:
        """Return True if the text so far ends inside reasoning."""
        return self._scanner.is_reasoning

    @property
    def num_calls_read(self) -> int:
        """Return the number of calls whose arguments are complete."""
        return self._scanner.num_calls_read

    @property
    def num_unread(self) -> int:
        """Return the number of characters that are still undecided: never more than a marker has."""
        return self._scanner.num_unread

    def feed(self, text: str) -> list[Event]:
        """Add text and return the events that are now certain."""
        self._scanner.feed(text)
        next(self._reading, None)
        return merged(self._scanner.take_events())

    def finish(self) -> list[Event]:
        """End the text and return the last events."""
        self._scanner.feed("", is_last=True)
        next(self._reading, None)
        return merged(self._scanner.take_events())

    def _read_all(self, read: Callable[[Scanner], Reading[None]]) -> Reading[None]:
        yield from read(self._scanner)
        yield from self._scanner.until(stops(), show(self._scanner, "content"))
        self._scanner.emit("content")
