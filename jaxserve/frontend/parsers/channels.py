"""The declaration of a format that puts reasoning, calls and content into named channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.frontend.parsers.bodies import Tools
from jaxserve.frontend.parsers.scanner import Reading, Scanner
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
