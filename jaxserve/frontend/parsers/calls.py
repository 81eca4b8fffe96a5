"""Parser of a reply with tool calls: sections between markers, with content around them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.frontend.parsers.bodies import Body, Place, Tools
from jaxserve.frontend.parsers.scanner import (
    SPACE,
    MalformedError,
    Reading,
    Scanner,
    show,
    show_but_trailing_space,
    stops,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Markers, and the syntax of the calls between them."""

    body: Body
    opener: str = ""
    """Text before each call. Empty: the reply begins with the calls, without a marker."""
    closer: str = ""
    """Text after each call; a model may omit it."""
    wrapper: str = ""
    """Text before all calls of a section; a model may omit it."""
    wrapper_end: str = ""
    inner: tuple[str, ...] = ()
    """Further control tokens that the parser needs to see."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Return the markers that announce calls."""
        return tuple(marker for marker in (self.wrapper, self.opener) if marker)

    @property
    def markers(self) -> tuple[str, ...]:
        """Return every marker that may be a control token."""
        return (*self.starts, self.closer, self.wrapper_end, *self.inner)


def read_reply(
    scanner: Scanner, sections: tuple[Section, ...], tools: Tools, dropped: tuple[str, ...] = ()
) -> Reading[None]:
    """Read content and calls to the end, and drop white space between them. dropped: tags that are no content."""
    for section in sections:
        if not section.opener:
            yield from _read_bare(scanner, section, tools)
    by_start = {start: section for section in sections for start in section.starts}
    ends = stops(*by_start, *dropped)
    while True:
        start = yield from scanner.until(ends, show_but_trailing_space(scanner, "content"))
        if not start:
            break
        if start in dropped:
            scanner.take(len(start))
            yield from scanner.run(SPACE)
            scanner.emit("syntax")
        else:
            yield from read_section(scanner, by_start[start], tools)
    scanner.emit("content")


def read_calls_or_json(scanner: Scanner, sections: tuple[Section, ...], tools: Tools) -> Reading[None]:
    """Read calls if the reply begins with their marker; otherwise all of it is content.

    A reply in JSON may have markers in its strings, and look like a call without a marker.
    """
    starts = [start for section in sections for start in section.starts]
    yield from scanner.run(SPACE)
    if starts and (yield from scanner.starting(*starts)):
        yield from read_reply(scanner, tuple(section for section in sections if section.opener), tools)
    else:
        yield from scanner.until(stops(), show(scanner, "content"))
        scanner.emit("content")


def _read_bare(scanner: Scanner, section: Section, tools: Tools) -> Reading[None]:
    try:
        yield from scanner.run(SPACE)
        yield from section.body.read(scanner, Place(tools, is_marked=False))
        yield from scanner.run(SPACE)
        scanner.emit("syntax")
    except MalformedError:
        scanner.emit("content")


def read_section(scanner: Scanner, section: Section, tools: Tools) -> Reading[None]:
    """Read one call, or several under one opener, with their markers."""
    try:
        if section.wrapper and (yield from scanner.accept(section.wrapper)):
            yield from scanner.run(SPACE)
        yield from scanner.expect(section.opener)
        yield from section.body.read(scanner, Place(tools, section.closer))
        for end in (section.closer, section.wrapper_end):
            if end:
                yield from scanner.accept(end)
            yield from scanner.run(SPACE)
        scanner.emit("syntax")
    except MalformedError:
        scanner.emit("content")
