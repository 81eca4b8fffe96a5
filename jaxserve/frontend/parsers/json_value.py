"""JSON written by a model: passed through unchanged, parsed only as far as to find its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from jaxserve.frontend.parsers.scanner import MalformedError, Reading, Scanner, Stops, stops

_QUOTE_OR_ESCAPE = stops('"', "\\")
_SCALAR_END = stops(*", ]}\n\t\r")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BRACKETS = ('"', "{", "}", "[", "]")


def escaped(text: str) -> str:
    """Return `text` escaped for the inside of a JSON string. Pieces of a text may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_string(scanner: Scanner) -> Reading[str]:
    """Take a JSON string and return its value, with U+FFFD for half a surrogate pair, which UTF-8 cannot express."""
    pieces: list[str] = []
    yield from _pass_string(scanner, lambda piece: pieces.append(scanner.take(len(piece))))
    try:
        text = json.loads("".join(pieces), strict=False)
    except ValueError:
        raise MalformedError from None
    assert isinstance(text, str), "it began with a quote"
    return _LONE_SURROGATE.sub("\ufffd", text)


def pass_value(scanner: Scanner, closers: tuple[str, ...], consume: Callable[[str], object]) -> Reading[None]:
    """Pass a value piece by piece to `consume`, which must take it.

    Objects and lists end with their last bracket, or before a closer outside their strings.
    """
    first = yield from scanner.peek()
    if first == '"':
        yield from _pass_string(scanner, consume)
    elif first in ("{", "["):
        yield from _pass_brackets(scanner, stops(*_BRACKETS, *closers), consume)
    elif not first or first in ",]}:":
        raise MalformedError
    else:
        yield from scanner.until(_SCALAR_END, consume)


def _pass_string(scanner: Scanner, consume: Callable[[str], object]) -> Reading[None]:
    if (yield from scanner.peek()) != '"':
        raise MalformedError
    consume('"')
    while True:
        stop = yield from scanner.until(_QUOTE_OR_ESCAPE, consume)
        if not stop:
            raise MalformedError
        consume(stop)
        if stop == '"':
            return
        following = yield from scanner.peek()
        if following:
            consume(following)


def _pass_brackets(scanner: Scanner, ends: Stops, consume: Callable[[str], object]) -> Reading[None]:
    depth = 0
    while True:
        stop = yield from scanner.until(ends, consume)
        if stop == '"':
            yield from _pass_string(scanner, consume)
            continue
        if stop not in _BRACKETS:
            return  # a closer, or the end of the text
        consume(stop)
        depth += 1 if stop in "{[" else -1
        if depth == 0:
            return
