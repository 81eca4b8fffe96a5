"""What a parser says of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["content", "reasoning", "name", "arguments", "syntax"]
"""`name` begins a call, `arguments` continue the newest one, `syntax` is nobody's text: markers and space beside them."""


@dataclass(frozen=True, slots=True)
class Event:
    """The next stretch of a text. The `source`s of all events, joined, are the text: nothing is lost or doubled."""

    kind: Kind
    text: str
    """What it means: empty for syntax; JSON for arguments, however the model spells them."""
    source: str
    """What stands in the text for it; may be empty."""


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbours of one kind joined. A name never joins another."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and runs[-1][0].kind == event.kind != "name":
            runs[-1].append(event)
        else:
            runs.append([event])
    return [Event(run[0].kind, "".join(e.text for e in run), "".join(e.source for e in run)) for run in runs]
