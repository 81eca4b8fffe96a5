"""Scanner for text that arrives in pieces; readers are generators that yield until more text arrives.

A reader is written as if the whole text were present. Every question to the scanner waits until the text, or its end,
decides the answer, so the cuts between pieces cannot change the result.

Cost: a question leaves at most a marker's length unread, so each character is looked at a bounded number of times.

Taken text goes to the draft, and `emit` turns the whole draft into an event. There is no other output, so the sources of
all events join to the text.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Generator
from typing import TypeVar

from jaxserve.frontend.parsers.events import Event, Kind

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A running reader: it yields when it needs more text, and returns its result."""

SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """The text is not what the reader expected; the text in the draft is ordinary content."""


class Stops:
    """Markers that end a stretch of text. None may contain another, so the first complete one is the first one."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        assert not any(a != b and a in b for a in markers for b in markers), f"{markers} overlap"
        self._markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        self._num_held = max(map(len, markers), default=1) - 1

    def first(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first marker at or after `start`."""
        return self._pattern.search(text, start)

    def beginning(self, text: str, start: int) -> int:
        """Return where an incomplete marker at the end of `text` begins; the length of `text` if there is none."""
        for place in range(max(start, len(text) - self._num_held), len(text)):
            if any(marker.startswith(text[place:]) for marker in self._markers):
                return place
        return len(text)


@functools.cache
def stops(*markers: str) -> Stops:
    """Return the cached `Stops` of these markers. Only for markers of formats: the cache is unbounded."""
    return Stops(markers)


class Scanner:
    """Buffer between the incoming text and a reader, and the reader's events."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._is_ended = False
        self._draft: list[str] = []
        self._events: list[Event] = []
        self.is_reasoning = False
        """True if the next text is reasoning, as far as is known."""
        self.num_calls_read = 0
        """Number of calls whose arguments are complete."""

    @property
    def num_unread(self) -> int:
        """Return the number of characters that are still undecided."""
        return len(self._buffer) - self._at

    @property
    def draft(self) -> str:
        """Return the text that was taken and not yet emitted."""
        return "".join(self._draft)

    def feed(self, text: str, *, is_last: bool = False) -> None:
        """Add text. Called by the parser, not by readers."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        self._is_ended = is_last

    def take_events(self) -> list[Event]:
        """Return the events since the last call. Called by the parser, not by readers."""
        events, self._events = self._events, []
        return events

    def emit(self, kind: Kind, text: str | None = None) -> None:
        """Turn the draft into an event; its text is the draft unless given (syntax has none)."""
        source = self.draft
        self._draft.clear()
        if text is None:
            text = "" if kind == "syntax" else source
        if source or text:
            self._events.append(Event(kind, text, source))

    def peek(self) -> Reading[str]:
        """Return the next character; empty at the end."""
        while self._at == len(self._buffer):
            if self._is_ended:
                return ""
            yield
        return self._buffer[self._at]

    def take(self, num_characters: int) -> str:
        """Move characters that are known to be present into the draft."""
        taken = self._buffer[self._at : self._at + num_characters]
        self._at += num_characters
        self._draft.append(taken)
        return taken

    def starting(self, *markers: str) -> Reading[str]:
        """Return the longest of `markers` that comes next, without taking it; empty if none does."""
        longest = max(map(len, markers))
        while True:
            rest = self._buffer[self._at : self._at + longest]
            if self._is_ended or not any(len(m) > len(rest) and m.startswith(rest) for m in markers):
                return max((m for m in markers if rest.startswith(m)), key=len, default="")
            yield

    def accept(self, *markers: str) -> Reading[str]:
        """Take and return the longest of `markers` that comes next; empty if none does."""
        marker = yield from self.starting(*markers)
        return self.take(len(marker)) if marker else ""

    def expect(self, *markers: str) -> Reading[str]:
        """Take one of `markers`. Raises MalformedError if none comes next."""
        marker = yield from self.accept(*markers)
        if not marker:
            raise MalformedError
        return marker

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Take the longest run of a class of characters, given as a pattern `[...]*`."""
        pieces = []
        while True:
            match = characters.match(self._buffer, self._at)
            assert match is not None, "the pattern matches the empty text"
            pieces.append(self.take(match.end() - self._at))
            if self._at < len(self._buffer) or self._is_ended:
                return "".join(pieces)
            yield

    def until(self, markers: Stops, consume: Callable[[str], object]) -> Reading[str]:
        """Pass the pieces before a marker to `consume`, which must take them; return the marker, or empty at the end."""
        while True:
            match = markers.first(self._buffer, self._at)
            if match is not None:
                end = match.start()
            else:
                end = len(self._buffer) if self._is_ended else markers.beginning(self._buffer, self._at)
            if end > self._at:
                consume(self._buffer[self._at : end])
            if match is not None:
                return match[0]
            if self._is_ended:
                return ""
            yield

    def text_until(self, markers: Stops, limit: int | None = None) -> Reading[str]:
        """Return the text before a marker, kept in the draft. Raises MalformedError after `limit` characters or at the end."""
        pieces: list[str] = []
        num_left = sys.maxsize if limit is None else limit

        def keep(piece: str) -> None:
            nonlocal num_left
            pieces.append(self.take(min(len(piece), num_left)))
            num_left -= len(piece)
            if num_left < 0:
                raise MalformedError

        if not (yield from self.until(markers, keep)):
            raise MalformedError
        return "".join(pieces)

    def forget_draft(self) -> None:
        """Drop the draft: it came before the text."""
        self._draft.clear()


def show(scanner: Scanner, kind: Kind, encode: Callable[[str], str] | None = None) -> Callable[[str], None]:
    """Return a `consume` that emits each piece at once."""

    def consume(piece: str) -> None:
        scanner.take(len(piece))
        scanner.emit(kind, None if encode is None else encode(piece))

    return consume


def show_but_trailing_space(scanner: Scanner, kind: Kind) -> Callable[[str], None]:
    """Return a `consume` that keeps white space in the draft until other text follows it."""

    def consume(piece: str) -> None:
        num_shown = len(piece.rstrip())
        if num_shown:
            scanner.take(num_shown)
            scanner.emit(kind)
        if num_shown < len(piece):
            scanner.take(len(piece) - num_shown)

    return consume


def show_but_last_newline(scanner: Scanner, kind: Kind, encode: Callable[[str], str]) -> Callable[[str], None]:
    """Return a `consume` that keeps a newline in the draft until other text follows it."""

    def consume(piece: str) -> None:
        is_held = piece.endswith("\n")
        scanner.take(len(piece) - is_held)
        scanner.emit(kind, encode(scanner.draft))
        if is_held:
            scanner.take(1)

    return consume
