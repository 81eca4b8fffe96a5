"""Reading whole replies with a parser, however they are cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.frontend.parsers.events import Event, merged
from jaxserve.frontend.parsers.formats import CHANNEL_FORMATS, REASONING_FORMATS, TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat

LONGEST_MARKER = 40

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "places": {"type": "array"},
            "note": {"type": ["string", "null"]},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
            "size": {"enum": [1, 2]},
            "share": {"type": "number", "enum": [1, 2.5]},
            "fixed": {"const": 3},
            "place": {"$ref": "#/$defs/Place"},
            "described": {"allOf": [{"$ref": "#/$defs/Place"}], "description": "A place"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "tree": {"$ref": "#/$defs/Tree"},
            "broken": {"type": [{}], "anyOf": 5, "allOf": "x", "enum": 7, "$ref": 3},
        },
        "$defs": {
            "Place": {"type": "object"},
            "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "array"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Reply:
    """The parts of a reply that a client gets."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def output_format(tools: str | None = None, reasoning: str | None = None) -> OutputFormat:
    for name in CHANNEL_FORMATS.keys() & {tools, reasoning}:
        return OutputFormat(channels=CHANNEL_FORMATS[name])
    return OutputFormat(TOOL_FORMATS[tools] if tools else None, REASONING_FORMATS[reasoning] if reasoning else None)


def events_of(spoken: OutputFormat, pieces: Iterable[str], prompt_end: str = "", tools: Any = TOOLS) -> list[Event]:
    """All events of a reply that arrives in `pieces`, neighbours joined."""
    parser = spoken.parser(tools, prompt_end)
    assert parser is not None
    events = []
    for piece in pieces:
        events += parser.feed(piece)
        assert parser.num_unread < LONGEST_MARKER
    return merged(events + parser.finish())


def reply_of(events: Iterable[Event]) -> Reply:
    reply = Reply()
    for event in events:
        if event.kind == "content":
            reply.content += event.text
        elif event.kind == "reasoning":
            reply.reasoning += event.text
        elif event.kind == "name":
            reply.calls.append((event.text, ""))
        elif event.kind == "arguments":
            name, arguments = reply.calls.pop()
            reply.calls.append((name, arguments + event.text))
    return reply


def read(spoken: OutputFormat, text: str, prompt_end: str = "", tools: Any = TOOLS) -> Reply:
    """The reply, after checking that it is the same character by character and that nothing of it is lost."""
    whole = events_of(spoken, [text], prompt_end, tools)
    single = events_of(spoken, text, prompt_end, tools)
    assert [(event.kind, event.text) for event in single] == [(event.kind, event.text) for event in whole]
    assert "".join(event.source for event in whole) == text
    assert "".join(event.source for event in single) == text
    return reply_of(whole)
