"""The output format of the served model, chosen by flag or from its chat template, and the parser of one request's replies."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from jaxserve.errors import invalid
from jaxserve.frontend.parsers.bodies import Tools
from jaxserve.frontend.parsers.calls import read_calls_or_json, read_reply
from jaxserve.frontend.parsers.channels import ChannelFormat
from jaxserve.frontend.parsers.formats import (
    CHANNEL_FORMATS,
    REASONING_FORMATS,
    REASONING_PARSERS,
    TOOL_FORMATS,
    TOOL_PARSERS,
    check_parsers,
)
from jaxserve.frontend.parsers.formats.generic import GENERIC_TOOLS
from jaxserve.frontend.parsers.parser import OutputParser
from jaxserve.frontend.parsers.reasoning import ReasoningFormat, read_reasoning
from jaxserve.frontend.parsers.scanner import Reading, Scanner
from jaxserve.frontend.parsers.tool_format import ToolFormat

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Formats of the model's replies. Without any, a reply is plain content."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    channels: ChannelFormat | None = None
    """One format for both, instead of `tools` and `reasoning`."""

    def __str__(self) -> str:
        tools, reasoning = (part or self.channels for part in (self.tools, self.reasoning))
        names = ("none" if part is None else part.name for part in (tools, reasoning))
        return "output format: tool calls {}, reasoning {}".format(*names)

    @property
    def has_tools(self) -> bool:
        """True if replies can contain tool calls."""
        return self.tools is not None or self.channels is not None

    @property
    def explains_tools(self) -> bool:
        """True if messages explain tools and show calls, instead of the chat template."""
        return self.tools is not None and self.tools.is_explained

    @property
    def has_reasoning(self) -> bool:
        """True if replies can contain reasoning."""
        return self.reasoning is not None or self.channels is not None

    def parser(
        self, tools: Tools, prompt_end: str, continued: str | None = None, *, is_json: bool = False
    ) -> OutputParser | None:
        """Return a parser for one reply, or None if the reply's text is its content.

        tools: functions that may be called, empty for none. prompt_end: end of the prompt's text, control tokens
        included. continued: the message that the reply continues, if it does. is_json: a reply without calls is JSON.
        Raises InvalidRequestError if that message has begun a call.
        """
        if self.channels is not None:
            channels = self.channels
            prefill = channels.prefill(prompt_end, continued)
            parser = OutputParser(lambda scanner: channels.read(scanner, tools), prefill)
        elif self.reasoning is None and not tools:
            return None
        else:
            parser = OutputParser(
                partial(self._read, tools=tools, is_json=is_json), self._prefill(prompt_end, continued)
            )
        if parser.has_begun_call:
            raise invalid("continue_final_message", "the last message ends in a tool call")
        return parser

    def markers(self, *, with_tools: bool) -> tuple[str, ...]:
        """Return the texts that a parser needs to see even if they are control tokens."""
        if self.channels is not None:
            return self.channels.markers
        reasoning = self.reasoning.markers if self.reasoning is not None else ()
        sections = self.tools.sections if self.tools is not None and with_tools else ()
        return (*reasoning, *(marker for section in sections for marker in section.markers if marker))

    @property
    def prompt_call_id(self) -> str | None:
        """Return the form of ids of calls in prompts: see `ToolFormat.prompt_id`."""
        return None if self.tools is None else self.tools.prompt_id

    def new_call_id(self) -> str:
        """Return an id for a call, as the model's chat template accepts it."""
        length = self.tools.num_id_characters if self.tools is not None else None
        if length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))

    def _prefill(self, prompt_end: str, continued: str | None) -> str:
        if continued is None:
            return self.reasoning.prefill(prompt_end) if self.reasoning is not None else ""
        if self.reasoning is not None and self.reasoning.starts_open and self.reasoning.opener not in continued:
            return self.reasoning.opener + continued
        return continued

    def _read(self, scanner: Scanner, tools: Tools, is_json: bool) -> Reading[None]:
        tags: tuple[str, ...] = ()
        if self.reasoning is not None:
            yield from read_reasoning(scanner, self.reasoning)
            tags = self.reasoning.answer_tags
        sections = self.tools.sections if self.tools is not None and tools else ()
        if sections and is_json:
            yield from read_calls_or_json(scanner, sections, tools)
        elif (sections or tags) and not is_json:
            yield from read_reply(scanner, sections, tools, tags)


def choose_output_format(
    templates: Sequence[str], tool_call_parser: str, reasoning_parser: str, *, takes_tools: bool = True
) -> OutputFormat:
    """Return the output format of a model with these chat templates.

    Both parsers are names, `none`, or `auto`: as the templates show. takes_tools: True if a template has a place for
    tools. Without one, and without a known sign, calls are in the generic format, which is explained to the model. Raises ConfigError if only one of them names a
    format of channels, which has calls and reasoning in one.
    """
    check_parsers(tool_call_parser, reasoning_parser)
    tool_call_parser, reasoning_parser = TOOL_PARSERS[tool_call_parser], REASONING_PARSERS[reasoning_parser]
    template = "\n".join(templates)
    flags = {tool_call_parser, reasoning_parser}
    for name in flags & CHANNEL_FORMATS.keys():
        return OutputFormat(channels=CHANNEL_FORMATS[name])
    if flags == {"auto"} and (channels := _matching(CHANNEL_FORMATS, template)) is not None:
        return OutputFormat(channels=channels)
    return OutputFormat(
        _tool_format(template, tool_call_parser, takes_tools=takes_tools),
        REASONING_FORMATS.get(reasoning_parser)
        if reasoning_parser != "auto"
        else _matching(REASONING_FORMATS, template),
    )


def _tool_format(template: str, name: str, *, takes_tools: bool) -> ToolFormat | None:
    if name == "none":
        return None
    if not takes_tools:
        return GENERIC_TOOLS
    if name != "auto":
        return TOOL_FORMATS.get(name)
    found = _matching(TOOL_FORMATS, template)
    is_known = found is not None and not any(sign in template for sign in found.foreign_signs)
    return found if is_known else GENERIC_TOOLS


class _Signed(Protocol):
    @property
    def template_signs(self) -> tuple[str, ...]: ...


F = TypeVar("F", bound=_Signed)


def _matching(formats: Mapping[str, F], template: str) -> F | None:
    """Return the first format that has a sign in the template."""
    return next((one for one in formats.values() if any(sign in template for sign in one.template_signs)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSpec:
    """The model's output format and the properties of the request that parsing needs. Default: plain text."""

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
    is_json: bool = False
    """True if a reply without calls is JSON."""

    def new_parser(self) -> OutputParser | None:
        """Return a parser for one choice, or None if its text is its content."""
        return self.output_format.parser(self.tools, self.prompt_end, self.continued, is_json=self.is_json)
