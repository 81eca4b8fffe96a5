"""Harmony, the format of gpt-oss: every message of a reply names its channel, and its recipient if it is a call.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`, and the token that ends the reply has no text.
"""

from __future__ import annotations

import re
from typing import Final

from jaxserve.frontend.parsers.bodies import MAX_HEADER_CHARS, Tools
from jaxserve.frontend.parsers.channels import ChannelFormat
from jaxserve.frontend.parsers.events import Kind
from jaxserve.frontend.parsers.scanner import (
    SPACE,
    MalformedError,
    Reading,
    Scanner,
    show,
    show_but_trailing_space,
    stops,
)
from jaxserve.frontend.parsers.tool_format import CallSyntax

_START: Final = "<|start|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL_MARKER: Final = "<|channel|>"
_CHANNEL = re.compile(re.escape(_CHANNEL_MARKER) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def _prefill(prompt_end: str, continued: str | None) -> str:
    """Return the message that the prompt has begun; a `continued` message is in the final channel."""
    if continued is not None:
        return f"{_START}assistant{_CHANNEL_MARKER}final{_MESSAGE}{continued}"
    begin = prompt_end.rfind(_START)
    return prompt_end[begin:] if begin >= 0 else ""


def _read(scanner: Scanner, tools: Tools) -> Reading[None]:
    """Read messages to the end. Messages of one kind are joined by newlines."""
    shown: set[Kind] = set()
    while (yield from scanner.peek()):
        try:
            header = yield from scanner.text_until(stops(_MESSAGE), MAX_HEADER_CHARS)
        except MalformedError:
            if _CHANNEL_MARKER in scanner.draft and not (yield from scanner.peek()):
                scanner.emit("syntax")  # the reply was cut inside a header
                return
            yield from scanner.until(stops(_START), show(scanner, "content"))
            scanner.emit("content")
            continue
        scanner.take(len(_MESSAGE))
        kind = _begin_message(scanner, header, tools)
        if kind in shown and kind != "arguments":
            scanner.emit(kind, "\n")
        shown.add(kind)
        yield from _read_body(scanner, kind)


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


def _read_body(scanner: Scanner, kind: Kind) -> Reading[None]:
    scanner.is_reasoning = kind == "reasoning"
    yield from scanner.run(SPACE)
    scanner.emit("syntax" if kind == "arguments" else kind)
    if kind == "arguments" and (yield from scanner.starting(_START, *_ENDS)):
        scanner.emit("arguments", "{}")
    end = yield from scanner.until(stops(_START, *_ENDS), show_but_trailing_space(scanner, kind))
    scanner.emit("syntax" if kind == "arguments" else kind)
    if end in _ENDS:
        scanner.take(len(end))
        scanner.emit("syntax")
    scanner.num_calls_read += kind == "arguments"
    scanner.is_reasoning = False


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
