"""How the replies to one request are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.frontend.parsers.bodies import Tools
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.parsers.parser import OutputParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSpec:
    """The model's output_format, and what the request and its prompt say of the reply. Without arguments: plain text."""

    output_format: OutputFormat = field(default_factory=OutputFormat)
    tools: Tools = field(default_factory=dict)
    """Functions that may be called."""
    prompt_end: str = ""
    continued: str | None = None
    """The message that the reply continues."""
    shown_token_ids: frozenset[int] = frozenset()
    """Control tokens that a parser has to see."""
    max_calls: int | None = None
    """A reply ends with so many calls; None: it may make any number."""

    def new_parser(self) -> OutputParser | None:
        """A parser for one choice; None when its text is its content."""
        return self.output_format.parser(self.tools, self.prompt_end, self.continued)
