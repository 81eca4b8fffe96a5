"""The declaration of a format that puts reasoning, calls and content into named channels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.frontend.parsers.bodies import MAX_HEADER_CHARS, Tools
from jaxserve.frontend.parsers.events import Kind
from jaxserve.frontend.parsers.scanner import (
    SPACE,
    MalformedError,
    Reading,
    Scanner,
    show,
    show_but_trailing_space,
    stops,
)
from jaxserve.frontend.parsers.tool_format import CallSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFormat:
    """One format for tool calls and reasoning."""

    name: str
    """Its name as a choice of both `--tool-call-parser` and `--reasoning-parser`."""
    tool_aliases: tuple[str, ...] = ()
    """Names that vLLM has for it, as choices of `--tool-call-parser`."""
    reasoning_aliases: tuple[str, ...] = ()
    """Names that vLLM has for it, as choices of `--reasoning-parser`."""
    template_signs: tuple[str, ...]
    """Texts that show in a chat template that the model uses this format; one is enough."""
    markers: tuple[str, ...]
    """Control tokens that the parser needs in the text."""
    read: Callable[[Scanner, Tools], Reading[None]]
    """Parses a reply."""
    prefill: Callable[[str, str | None], str]
    """Returns the text of the format that the prompt's end, or the continued message, has already begun."""
    begin: str
    """The end of a prompt, after which a reply begins."""
    reasoning: tuple[str, str]
    """The texts before and after a message of reasoning; another message follows."""
    answer: str
    """The text before the answer."""
    syntax: CallSyntax
    """The way in which calls are written, for a grammar."""
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMarkers:
    """Control tokens around the messages of a reply: each has a header, then a body."""

    start: str
    """Begins a header. The header of the first message may have begun in the prompt."""
    message: str
    """Ends a header."""
    ends: tuple[str, ...]
    """Each ends a body."""
    header_sign: re.Pattern[str]
    """A pattern that shows that a reply was cut inside a header."""


def read_messages(
    scanner: Scanner,
    markers: MessageMarkers,
    begin: Callable[[str], Kind],
    read_call: Callable[[], Reading[None]],
) -> Reading[None]:
    """Read messages to the end. Messages of one kind are joined by newlines.

    begin: emits the events of a header and returns the kind of its message, `arguments` for a call. read_call: reads the
    body of a call up to its end.
    """
    shown: set[Kind] = set()
    ends = stops(markers.start, *markers.ends)
    while (yield from scanner.peek()):
        try:
            header = yield from scanner.text_until(stops(markers.message), MAX_HEADER_CHARS)
        except MalformedError:
            if markers.header_sign.search(scanner.draft) and not (yield from scanner.peek()):
                scanner.emit("syntax")
                return
            yield from scanner.until(stops(markers.start), show(scanner, "content"))
            scanner.emit("content")
            continue
        scanner.take(len(markers.message))
        kind = begin(header)
        if kind in shown and kind != "arguments":
            scanner.emit(kind, "\n")
        shown.add(kind)
        if kind == "arguments":
            yield from read_call()
        else:
            scanner.is_reasoning = kind == "reasoning"
            yield from scanner.run(SPACE)
            scanner.emit(kind)
            yield from scanner.until(ends, show_but_trailing_space(scanner, kind))
            scanner.emit(kind)
        if (yield from scanner.accept(*markers.ends)):
            scanner.emit("syntax")
        scanner.is_reasoning = False
