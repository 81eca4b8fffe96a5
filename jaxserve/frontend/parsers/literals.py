"""Incremental conversion of Python literals and Gemma's objects to JSON.

Nothing is evaluated. An atom that is neither a number nor a known word is a string: a model that forgets the quotes of
`Paris` means a string.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.frontend.parsers.json_value import escaped
from jaxserve.frontend.parsers.scanner import SPACE, MalformedError, Reading, Scanner, Stops, show, stops

MAX_DEPTH = 64
"""Largest nesting of lists and objects; deeper ones are malformed."""

_MAX_NUMBER_CHARS = 64
_MAX_INTEGER_CHARS = 4000
"""Longer ones are more than Python's readers of JSON take."""
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "/": "/", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """Syntax of values in a model family's calls."""

    quotes: tuple[str, ...]
    has_escapes: bool
    words: Mapping[str, str]
    """JSON of each known word."""
    atom_stops: Stops
    """Texts that end a number, a word, or a string without quotes."""


_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
PYTHON = LiteralSyntax(
    quotes=('"""', "'''", '"', "'"),
    has_escapes=True,
    words=_WORDS,
    atom_stops=stops(*",()[]{}"),
)
GEMMA = LiteralSyntax(
    quotes=("<escape>", '<|"|>', '"'),
    has_escapes=False,
    words=_WORDS,
    atom_stops=stops(*",[]{}"),
)


def convert_value(scanner: Scanner, syntax: LiteralSyntax, depth: int = 0) -> Reading[None]:
    """Take a value and emit it as arguments. Raises MalformedError."""
    yield from scanner.run(SPACE)
    quote = yield from scanner.starting(*syntax.quotes)
    if quote:
        yield from _convert_string(scanner, syntax, quote)
        return
    first = yield from scanner.peek()
    if first == "{":
        scanner.take(1)
        yield from convert_members(scanner, syntax, ":", "}", depth + 1)
    elif first in ("[", "("):
        scanner.take(1)
        yield from _convert_list(scanner, syntax, "]" if first == "[" else ")", depth + 1)
    else:
        scanner.emit("arguments", _atom_json((yield from _read_atom(scanner, syntax.atom_stops)), syntax))


def convert_members(scanner: Scanner, syntax: LiteralSyntax, sign: str, end: str, depth: int = 0) -> Reading[None]:
    """Take the rest of an object, whose opening is in the draft: keys, `sign`, values, up to `end`."""
    _check_depth(depth)
    scanner.emit("arguments", "{")
    between = ""
    while not (yield from _at_end(scanner, end)):
        yield from _convert_key(scanner, syntax, sign, between)
        between = ", "
        yield from convert_value(scanner, syntax, depth)
        yield from _pass_comma(scanner, end)
    scanner.emit("arguments", "}")


def _convert_list(scanner: Scanner, syntax: LiteralSyntax, end: str, depth: int) -> Reading[None]:
    _check_depth(depth)
    scanner.emit("arguments", "[")
    is_first = True
    while not (yield from _at_end(scanner, end)):
        if not is_first:
            scanner.emit("arguments", ", ")
        is_first = False
        yield from convert_value(scanner, syntax, depth)
        yield from _pass_comma(scanner, end)
    scanner.emit("arguments", "]")


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise MalformedError


def _at_end(scanner: Scanner, end: str) -> Reading[bool]:
    yield from scanner.run(SPACE)
    return bool((yield from scanner.accept(end)))


def _pass_comma(scanner: Scanner, end: str) -> Reading[None]:
    yield from scanner.run(SPACE)
    if (yield from scanner.peek()) != end:
        yield from scanner.expect(",")


def _convert_key(scanner: Scanner, syntax: LiteralSyntax, sign: str, between: str) -> Reading[None]:
    """Take a key and `sign`, and emit them after `between`."""
    quote = yield from scanner.starting(*syntax.quotes)
    if not quote:
        key = (yield from scanner.text_until(stops(sign, *"'\",()[]{}\n"))).strip()
        yield from scanner.expect(sign)
        scanner.emit("arguments", f"{between}{json.dumps(key, ensure_ascii=False)}: ")
        return
    scanner.emit("arguments", between)
    yield from _convert_string(scanner, syntax, quote)
    yield from scanner.run(SPACE)
    yield from scanner.expect(sign)
    scanner.emit("arguments", ": ")


def _read_atom(scanner: Scanner, ends: Stops) -> Reading[str]:
    atom = (yield from scanner.text_until(ends)).strip()
    if not atom:
        raise MalformedError
    return atom


def _atom_json(atom: str, syntax: LiteralSyntax) -> str:
    if atom in syntax.words:
        return syntax.words[atom]
    if len(atom) <= _MAX_INTEGER_CHARS and _INTEGER.fullmatch(atom):
        return atom
    if len(atom) <= _MAX_NUMBER_CHARS:
        if _NUMBER.fullmatch(atom) and math.isfinite(float(atom)):
            return atom
        for kind in (int, float):  # 1_000, .5, +3: numbers that Python writes in another way than JSON
            try:
                number = kind(atom)
            except ValueError:
                continue
            if math.isfinite(number):
                return json.dumps(number)
    return json.dumps(atom, ensure_ascii=False)


def _convert_string(scanner: Scanner, syntax: LiteralSyntax, quote: str) -> Reading[None]:
    scanner.take(len(quote))
    scanner.emit("arguments", '"')
    ends = stops(quote, "\\") if syntax.has_escapes else stops(quote)
    while True:
        stop = yield from scanner.until(ends, show(scanner, "arguments", escaped))
        if not stop:
            raise MalformedError
        scanner.take(len(stop))
        if stop == quote:
            scanner.emit("arguments", '"')
            return
        yield from _convert_escape(scanner)


def _convert_escape(scanner: Scanner) -> Reading[None]:
    """Take the rest of a Python escape, whose backslash is in the draft; an unknown one stands for itself."""
    letter = yield from scanner.peek()
    if letter:
        scanner.take(1)
    if letter not in _HEX_DIGITS:
        scanner.emit("arguments", escaped(_ESCAPES.get(letter, letter if letter in "\\'\"" else "\\" + letter)))
        return
    digits = ""
    while len(digits) < _HEX_DIGITS[letter]:
        digit = yield from scanner.peek()
        if not _HEX.fullmatch(digit):
            break
        digits += scanner.take(1)
    is_character = len(digits) == _HEX_DIGITS[letter] and int(digits, 16) <= 0x10FFFF
    if not is_character:
        scanner.emit("arguments", escaped("\\" + letter + digits))
    elif 0xD800 <= int(digits, 16) < 0xE000:
        scanner.emit("arguments", f"\\u{int(digits, 16):04x}")  # half of a surrogate pair, in JSON's form
    else:
        scanner.emit("arguments", escaped(chr(int(digits, 16))))
