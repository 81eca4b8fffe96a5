"""Muse Glimmer: every message of a reply names its recipient, the user, the model itself or a function.

    <|start|>assistant to=self<|message|>...<|eom|>
    <|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="city">Paris</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>
    <|start|>assistant to=user<|message|>...<|eot|>

The prompt ends with `<|start|>assistant`. Calls are read only in messages to functions.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from jaxserve.frontend.parsers.bodies import Tools
from jaxserve.frontend.parsers.calls import Section, read_section
from jaxserve.frontend.parsers.channels import ChannelFormat, MessageMarkers, read_messages
from jaxserve.frontend.parsers.events import Kind
from jaxserve.frontend.parsers.scanner import SPACE, Reading, Scanner, show, stops
from jaxserve.frontend.parsers.tagged import TaggedBody
from jaxserve.frontend.parsers.tool_format import CallSyntax

_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|eom|>", "<|eot|>")
_MARKERS: Final = MessageMarkers(
    start=_START, message=_MESSAGE, ends=_ENDS, header_sign=re.compile(r"^\s*to=|<\|start\|>")
)
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_BODY: Final = TaggedBody(
    name_end='">',
    parameter='<atem:parameter name="',
    parameter_name_end='">',
    parameter_end="</atem:parameter>",
    has_own_lines=False,
)
_SECTION: Final = Section(
    wrapper="<atem:function_calls>",
    opener='<atem:invoke name="',
    body=_BODY,
    closer="</atem:invoke>",
    wrapper_end="</atem:function_calls>",
)


def _prefill(prompt_end: str, continued: str | None) -> str:
    """Return the message that the prompt has begun; a `continued` message is to the user."""
    if continued is not None:
        return f"{_START}assistant to=user{_MESSAGE}{continued}"
    begin = prompt_end.rfind(_START)
    return prompt_end[begin:] if begin >= 0 else ""


def _read(scanner: Scanner, tools: Tools) -> Reading[None]:
    """Read messages to the end."""
    yield from read_messages(
        scanner, _MARKERS, partial(_begin_message, scanner, tools=tools), partial(_read_calls, scanner, tools)
    )


def _begin_message(scanner: Scanner, header: str, tools: Tools) -> Kind:
    scanner.emit("syntax")
    recipient = _RECIPIENT.search(header)
    if recipient is None or recipient[1] == "user":
        return "content"
    return "reasoning" if recipient[1] == "self" else "arguments" if tools else "content"


def _read_calls(scanner: Scanner, tools: Tools) -> Reading[None]:
    ends = stops(_START, *_ENDS, *_SECTION.starts)
    while True:
        yield from scanner.run(SPACE)
        scanner.emit("syntax")
        if (yield from scanner.until(ends, show(scanner, "content"))) not in _SECTION.starts:
            return
        yield from read_section(scanner, _SECTION, tools)


MUSE_GLIMMER: Final = ChannelFormat(
    name="muse_glimmer",
    template_signs=("<atem:function_calls>",),
    markers=(_START, _MESSAGE, *_ENDS),
    read=_read,
    prefill=_prefill,
    begin=f"{_START}assistant",
    reasoning=(f" to=self{_MESSAGE}", f"<|eom|>{_START}assistant"),
    answer=f" to=user{_MESSAGE}",
    syntax=CallSyntax(
        is_bare=True,
        before=f' to={{name}}{_MESSAGE}<atem:function_calls>\n<atem:invoke name="',
        between='">\n',
        arguments=_BODY,
        after="</atem:invoke>\n</atem:function_calls>",
        is_name_quoted=False,
    ),
)
