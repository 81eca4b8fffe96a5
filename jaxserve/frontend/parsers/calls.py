"""Where calls stand in a reply: sections between markers, with content around them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.frontend.parsers.bodies import Body, Place, Tools
from jaxserve.frontend.parsers.scanner import SPACE, MalformedError, Reading, Scanner, stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Markers, and how the calls between them are written."""

    body: Body
    opener: str = ""
    """Before each call. Empty: the calls begin the reply, and no marker says so."""
    closer: str = ""
    """Behind each call; may be missing in a text."""
    wrapper: str = ""
    """Before all calls of a section; may be missing in a text."""
    wrapper_end: str = ""
    inner: tuple[str, ...] = ()
    """Control tokens between the markers, which must not be hidden either."""

    @property
    def starts(self) -> tuple[str, ...]:
        """What tells that calls follow."""
        return tuple(marker for marker in (self.wrapper, self.opener) if marker)

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that may be a control token."""
        return (*self.starts, self.closer, self.wrapper_end, *self.inner)


def read_reply(scanner: Scanner, sections: tuple[Section, ...], tools: Tools) -> Reading[None]:
    """Read content with calls in it to the end. White space between them is nobody's."""
    for section in sections:
        if not section.opener:
            yield from _read_bare(scanner, section, tools)
    by_start = {start: section for section in sections for start in section.starts}
    ends = stops(*by_start)
    while True:
        start = yield from scanner.until(ends, scanner.show_but_trailing_space("content"))
        if not start:
            break
        yield from _read_section(scanner, by_start[start], tools)
    scanner.emit("content")


def _read_bare(scanner: Scanner, section: Section, tools: Tools) -> Reading[None]:
    try:
        yield from scanner.run(SPACE)
        yield from section.body.read(scanner, Place(tools, is_marked=False))
        yield from scanner.run(SPACE)
        scanner.emit("syntax")
    except MalformedError:
        scanner.emit("content")


def _read_section(scanner: Scanner, section: Section, tools: Tools) -> Reading[None]:
    """Read one call, or several that are written as one, and the markers beside it."""
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
