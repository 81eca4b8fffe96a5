"""What a served model speaks: its tool calls and its reasoning, chosen by flag or from its chat template."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxserve.errors import ConfigError, invalid
from jaxserve.frontend.parsers import harmony
from jaxserve.frontend.parsers.bodies import Tools
from jaxserve.frontend.parsers.calls import read_reply
from jaxserve.frontend.parsers.formats import HARMONY, HARMONY_SIGN, REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from jaxserve.frontend.parsers.parser import OutputParser
from jaxserve.frontend.parsers.reasoning import ReasoningFormat, read_reasoning
from jaxserve.frontend.parsers.scanner import Reading, Scanner

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How replies of the served model are read."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    has_channels: bool = False
    """Harmony: one format for both."""

    def __str__(self) -> str:
        tools = HARMONY if self.has_channels else self.tools.name if self.tools is not None else "none"
        reasoning = HARMONY if self.has_channels else self.reasoning.name if self.reasoning is not None else "none"
        return f"replies are read as: tool calls {tools}, reasoning {reasoning}"

    @property
    def has_tools(self) -> bool:
        return self.tools is not None or self.has_channels

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None or self.has_channels

    def parser(self, tools: Tools, prompt_end: str, continued: str | None = None) -> OutputParser | None:
        """A parser for one reply; None when its text is its content.

        `tools` are those a call may be made to, empty for none. `prompt_end` is the end of the prompt's text,
        control tokens included; `continued` is the message that the reply continues, if it does.
        Raises InvalidRequestError when that message has begun a call.
        """
        if self.has_channels:
            parser = OutputParser(partial(harmony.read_harmony, tools=tools), harmony.prefill(prompt_end, continued))
        elif self.reasoning is None and not tools:
            return None
        else:
            parser = OutputParser(self._reader(tools), self._prefill(prompt_end, continued))
        if parser.has_begun_call:
            raise invalid("continue_final_message", "the last message ends in a tool call")
        return parser

    def _prefill(self, prompt_end: str, continued: str | None) -> str:
        if continued is None:
            return self.reasoning.prefill(prompt_end) if self.reasoning is not None else ""
        if self.reasoning is not None and self.reasoning.starts_open and self.reasoning.opener not in continued:
            return self.reasoning.opener + continued
        return continued

    def markers(self, *, with_tools: bool) -> tuple[str, ...]:
        """What a parser has to see, even where it is a control token."""
        if self.has_channels:
            return harmony.MARKERS
        reasoning = (self.reasoning.opener, self.reasoning.closer) if self.reasoning is not None else ()
        sections = self.tools.sections if self.tools is not None and with_tools else ()
        return (*reasoning, *(marker for section in sections for marker in section.markers if marker))

    def new_call_id(self) -> str:
        """An id for a call."""
        length = self.tools.num_id_characters if self.tools is not None else None
        if length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))

    def _reader(self, tools: Tools) -> Callable[[Scanner], Reading[None]]:
        sections = self.tools.sections if self.tools is not None and tools else ()

        def read(scanner: Scanner) -> Reading[None]:
            if self.reasoning is not None:
                yield from read_reasoning(scanner, self.reasoning)
            if sections:
                yield from read_reply(scanner, sections, tools)

        return read


def choose_output_format(templates: Sequence[str], tool_call_parser: str, reasoning_parser: str) -> OutputFormat:
    """The output_format of a model with these chat templates; `auto` asks them, a name or `none` decides.

    Raises ConfigError when one flag says harmony and the other something else: channels carry both.
    """
    text = "\n".join(templates)
    flags = (tool_call_parser, reasoning_parser)
    if HARMONY in flags:
        if not set(flags) <= {HARMONY, "auto"}:
            raise ConfigError(
                f"--tool-call-parser {tool_call_parser} with --reasoning-parser {reasoning_parser}: the channels of "
                "harmony carry both, so that both must say harmony or auto"
            )
        return OutputFormat(has_channels=True)
    if flags == ("auto", "auto") and HARMONY_SIGN in text:
        return OutputFormat(has_channels=True)
    return OutputFormat(
        TOOL_FORMATS.get(tool_call_parser) if tool_call_parser != "auto" else _tools_of(text),
        REASONING_FORMATS.get(reasoning_parser) if reasoning_parser != "auto" else _reasoning_of(text),
    )


def _tools_of(template: str) -> ToolFormat | None:
    rows = (row for row in TOOL_FORMATS.values() if _has_sign(template, row.template_signs))
    row = next(rows, None)
    return None if row is None or _has_sign(template, row.foreign_signs) else row


def _reasoning_of(template: str) -> ReasoningFormat | None:
    return next((row for row in REASONING_FORMATS.values() if _has_sign(template, row.template_signs)), None)


def _has_sign(template: str, signs: Sequence[str]) -> bool:
    return any(sign in template for sign in signs)
