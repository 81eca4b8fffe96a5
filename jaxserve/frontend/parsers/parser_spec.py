"""The parser of the replies to one request, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.frontend.parsers.bodies import Tools
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.parsers.parser import OutputParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSpec:
    """The model's output format and the facts of the request that parsing needs. Default: plain text."""

    output_format: OutputFormat = field(default_factory=OutputFormat)
    tools: Tools = field(default_factory=dict)
    """Parameter schemas of the functions that may be called, by name."""
    prompt_end: str = ""
    """End of the prompt's text, control tokens included."""
    continued: str | None = None
    """The message that the reply continues."""
    shown_token_ids: frozenset[int] = frozenset()
    """Control tokens that the parser needs in the text."""
    max_calls: int | None = None
    """Number of calls that ends a reply. None: any number."""

    def new_parser(self) -> OutputParser | None:
        """Return a parser for one choice, or None if its text is its content."""
        return self.output_format.parser(self.tools, self.prompt_end, self.continued)
