"""Events that an output parser emits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["content", "reasoning", "name", "arguments", "syntax"]
"""`name` begins a call, `arguments` continue the newest call, `syntax` is dropped: markers and white space beside them."""


@dataclass(frozen=True, slots=True)
class Event:
    """The next part of a reply. The joined `source`s of all events equal the text: nothing is lost or repeated."""

    kind: Kind
    text: str
    """Parsed text: JSON for arguments, empty for syntax."""
    source: str
    """Model output that it came from; may be empty."""


def merged(events: list[Event]) -> list[Event]:
    """Join neighbours of one kind. A name never joins another name."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and runs[-1][0].kind == event.kind != "name":
            runs[-1].append(event)
        else:
            runs.append([event])
    return [Event(run[0].kind, "".join(e.text for e in run), "".join(e.source for e in run)) for run in runs]
