"""A text that arrives in pieces, read by generators that wait for more.

A reader is a generator: it asks the scanner for what comes next, and its `yield` means "not here yet". So a
format is written as if its whole text were there, and where the text was cut cannot change what is read:
every question waits until the text, or its end, decides it.

Cost: a question leaves at most a marker's length unread, so that each character is looked at a bounded
number of times whatever the pieces are.

What is taken goes to the draft, and `emit` makes an event of the whole draft. No other way leads out, so that
the events' sources always join to the text.
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
"""A reader under way; yields when it needs more text, returns what it read."""

SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """The text is not what the reader expected: what is still in the draft is ordinary content."""


class Stops:
    """Markers that end a stretch of text. None may be part of another: then the first one complete is the first one."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        assert not any(a != b and a in b for a in markers for b in markers), f"{markers} overlap"
        self._markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        self._num_held = max(map(len, markers), default=1) - 1

    def first(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker at or behind `start`."""
        return self._pattern.search(text, start)

    def beginning(self, text: str, start: int) -> int:
        """Where an incomplete marker at the end of `text` begins; its length if there is none."""
        for place in range(max(start, len(text) - self._num_held), len(text)):
            if any(marker.startswith(text[place:]) for marker in self._markers):
                return place
        return len(text)


@functools.cache
def stops(*markers: str) -> Stops:
    """One `Stops` for each set of markers; for those of formats, not of requests."""
    return Stops(markers)


class Scanner:
    """The text between who feeds it and who reads it."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0
        self._is_ended = False
        self._draft: list[str] = []
        self._events: list[Event] = []
        self.is_reasoning = False
        """Whether what comes next is reasoning, as far as is known."""
        self.num_calls_read = 0
        """Calls whose arguments are complete."""

    @property
    def num_unread(self) -> int:
        """Characters that wait for a decision."""
        return len(self._buffer) - self._at

    @property
    def draft(self) -> str:
        """What was taken and not yet emitted."""
        return "".join(self._draft)

    def feed(self, text: str, *, is_last: bool = False) -> None:
        """More text. For whoever drives the reader."""
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        self._is_ended = is_last

    def take_events(self) -> list[Event]:
        """The events since the last call. For whoever drives the reader."""
        events, self._events = self._events, []
        return events

    def emit(self, kind: Kind, text: str | None = None) -> None:
        """The draft becomes an event; its text is the draft itself unless given (syntax has none)."""
        source = self.draft
        self._draft.clear()
        if text is None:
            text = "" if kind == "syntax" else source
        if source or text:
            self._events.append(Event(kind, text, source))

    def peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        while self._at == len(self._buffer):
            if self._is_ended:
                return ""
            yield
        return self._buffer[self._at]

    def take(self, num_characters: int) -> str:
        """Move characters that are known to be there into the draft."""
        taken = self._buffer[self._at : self._at + num_characters]
        self._at += num_characters
        self._draft.append(taken)
        return taken

    def starting(self, *markers: str) -> Reading[str]:
        """The longest of `markers` that comes next, not taken; empty when none does."""
        longest = max(map(len, markers))
        while True:
            rest = self._buffer[self._at : self._at + longest]
            if self._is_ended or not any(len(m) > len(rest) and m.startswith(rest) for m in markers):
                return max((m for m in markers if rest.startswith(m)), key=len, default="")
            yield

    def accept(self, *markers: str) -> Reading[str]:
        """Take the longest of `markers` that comes next, if one does."""
        marker = yield from self.starting(*markers)
        return self.take(len(marker)) if marker else ""

    def expect(self, *markers: str) -> Reading[str]:
        """Take one of `markers`; raises MalformedError when none comes next."""
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
        """Give `consume`, which must take them, the pieces before a marker; returns it, not taken, or empty at the end."""
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
        """The text before a marker, kept in the draft. Raises MalformedError behind `limit` characters and at the end."""
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

    def show(self, kind: Kind, encode: Callable[[str], str] | None = None) -> Callable[[str], None]:
        """A `consume` that emits each piece at once."""

        def consume(piece: str) -> None:
            self.take(len(piece))
            self.emit(kind, None if encode is None else encode(piece))

        return consume

    def show_but_trailing_space(self, kind: Kind) -> Callable[[str], None]:
        """A `consume` that leaves white space in the draft until something else follows it."""

        def consume(piece: str) -> None:
            num_shown = len(piece.rstrip())
            if num_shown:
                self.take(num_shown)
                self.emit(kind)
            if num_shown < len(piece):
                self.take(len(piece) - num_shown)

        return consume

    def show_but_last_newline(self, kind: Kind, encode: Callable[[str], str]) -> Callable[[str], None]:
        """A `consume` that leaves a newline in the draft until something else follows it."""

        def consume(piece: str) -> None:
            is_held = piece.endswith("\n")
            self.take(len(piece) - is_held)
            self.emit(kind, encode(self.draft))
            if is_held:
                self.take(1)

        return consume

    def forget_draft(self) -> None:
        """What was taken so far is no part of the text: it came before it."""
        self._draft.clear()
