"""Harmony, the format of gpt-oss: every message of a reply names its channel, and its recipient if it is a call.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`, and the token that ends the reply has no text.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from jaxserve.frontend.parsers.bodies import Tools
from jaxserve.frontend.parsers.channels import ChannelFormat, MessageMarkers, read_messages
from jaxserve.frontend.parsers.events import Kind
from jaxserve.frontend.parsers.scanner import (
    SPACE,
    Reading,
    Scanner,
    show_but_trailing_space,
    stops,
)
from jaxserve.frontend.parsers.tool_format import CallSyntax

_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL_MARKER: Final = "<|channel|>"
_MARKERS: Final = MessageMarkers(
    start=_START, message=_MESSAGE, ends=_ENDS, header_sign=re.compile(re.escape(_CHANNEL_MARKER))
)
_CHANNEL = re.compile(re.escape(_CHANNEL_MARKER) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def _prefill(prompt_end: str, continued: str | None) -> str:
    """Return the message that the prompt has begun; a `continued` message is in the final channel."""
    if continued is not None:
        return f"{_START}assistant{_CHANNEL_MARKER}final{_MESSAGE}{continued}"
    begin = prompt_end.rfind(_START)
    return prompt_end[begin:] if begin >= 0 else ""


def _read(scanner: Scanner, tools: Tools) -> Reading[None]:
    """Read messages to the end."""
    yield from read_messages(
        scanner, _MARKERS, partial(_begin_message, scanner, tools=tools), partial(_read_call, scanner)
    )


def _begin_message(scanner: Scanner, header: str, tools: Tools) -> Kind:
    """Emit the events of a header and return the kind of the message."""
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        name = recipient[1].removeprefix("functions.")
        if tools and (name != recipient[1] or name in tools):
            scanner.emit("name", name)
            return "arguments"
    scanner.emit("syntax")
    channel = _CHANNEL.search(header)
    return "reasoning" if channel is not None and channel[1] == "analysis" else "content"


def _read_call(scanner: Scanner) -> Reading[None]:
    yield from scanner.run(SPACE)
    scanner.emit("syntax")
    if (yield from scanner.starting(_START, *_ENDS)):
        scanner.emit("arguments", "{}")
    yield from scanner.until(stops(_START, *_ENDS), show_but_trailing_space(scanner, "arguments"))
    scanner.emit("syntax")
    yield from scanner.accept(*_ENDS)
    scanner.emit("syntax")
    scanner.num_calls_read += 1


HARMONY: Final = ChannelFormat(
    name="harmony",
    tool_aliases=("openai",),
    reasoning_aliases=("openai_gptoss",),
    template_signs=(_CHANNEL_MARKER,),
    markers=(_START, _MESSAGE, *_ENDS, _CHANNEL_MARKER, "<|constrain|>"),
    read=_read,
    prefill=_prefill,
    begin=f"{_START}assistant",
    reasoning=(f"{_CHANNEL_MARKER}analysis{_MESSAGE}", f"<|end|>{_START}assistant"),
    answer=f"{_CHANNEL_MARKER}final{_MESSAGE}",
    syntax=CallSyntax(
        is_bare=True,
        before=f"{_CHANNEL_MARKER}commentary to=functions.",
        between=f" <|constrain|>json{_MESSAGE}",
        after="",
        is_name_quoted=False,
    ),
)
