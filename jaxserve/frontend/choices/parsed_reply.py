"""The parts of a whole choice: content, reasoning and calls, joined from its output deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.parsers.events import Event, merged


def events_of(deltas: Iterable[OutputDelta]) -> list[Event]:
    """Return the events of a whole choice, neighbours of one kind merged."""
    return merged([event for delta in deltas for event in delta.content_events])


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A whole reply, divided into its parts."""

    content: str
    reasoning: str
    calls: list[Call]


def parsed_reply(deltas: Iterable[OutputDelta]) -> ParsedReply:
    """Return the parts of a whole choice."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[str, list[str]]] = []
    for event in events_of(deltas):
        if event.kind == "name":
            calls.append((event.text, []))
        elif event.kind == "arguments":
            calls[-1][1].append(event.text)
        elif event.kind != "syntax":
            texts[event.kind].append(event.text)
    return ParsedReply(
        "".join(texts["content"]),
        "".join(texts["reasoning"]),
        [Call(name, "".join(arguments)) for name, arguments in calls],
    )
