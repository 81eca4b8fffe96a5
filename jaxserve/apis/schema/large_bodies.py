"""Large JSON bodies in parts: counts their values, and decodes their long texts and lists of numbers.

A decoder holds the interpreter's lock until it returns: 50 to 200 ns for each value, of which 8 MiB may have four million, 24 ms
for eight million escaped characters, and 40 ms for a million token ids. A thread beside the event loop would stop the loop as
well. Between two parts of 64 KiB the lock is free.

Values are counted before anything is decoded. A short name stands for each long text while the body is decoded, and the text,
decoded part by part, takes its place afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import add
from typing import Any, Final

import msgspec

PART_BYTES: Final = 64 << 10
"""Bytes that are counted, searched or decoded at once: about a millisecond for the worst ones. Texts that reach from one such
part into the next and are longer than it are the long ones. A single inner list of numbers is never cut."""
_TEXT: Final = msgspec.json.Decoder(str)
_LIST: Final = msgspec.json.Decoder(list[Any])
_NUMERIC: Final = b"0123456789+-.eE, \t\r\n[]"
_ESCAPE_AT_END: Final = re.compile(rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
"""An escape that is cut off, and the first half of a pair of surrogates."""
_PAIR: Final = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_WHOLE_ESCAPES: Final = re.compile(rb"(?:[^\\]+|\\[^u]|%b|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*" % _PAIR)
"""Whole escapes and what is between them. Its repeats are not possessive, which Python before 3.11.5 matches wrongly."""
_HALF_A_PAIR: Final = re.compile(rb"(?!%b)\\u[dD][89a-fA-F][0-9a-fA-F]{2}" % _PAIR)
_LONGEST_ESCAPE: Final = 12
_POSITION: Final = re.compile(r"\(byte (\d+)\)$")


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """Numbers of values in a JSON text."""

    all: int
    """All values but keys; an empty list or object may count twice."""
    containers: int
    """Lists and objects."""
    keys: int

    def exceed(self, most: int) -> bool:
        """Return True for more than `most` lists and objects, or keys."""
        return self.containers > most or self.keys > most


def count_values(body: bytes, most: int) -> ValueCounts:
    """Count the values of a JSON text, or of its beginning if that has more than `most` containers or keys.

    Of a text that is no JSON, the part before the first mistake is counted.
    """
    num_commas = num_containers = num_keys = 0
    is_in_string = False
    for part in _parts(body):
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[is_in_string::2])
        num_commas += outside.count(b",")
        num_containers += outside.count(b"[") + outside.count(b"{")
        num_keys += outside.count(b":")
        is_in_string ^= len(pieces) % 2 == 0
        if num_containers > most or num_keys > most:
            break
    return ValueCounts(1 + num_commas + num_containers, num_containers, num_keys)


def _parts(body: bytes) -> Iterator[bytes]:
    """Yield the parts of a JSON text, which cut no escape in two."""
    start = 0
    while start < len(body):
        part = body[start : start + PART_BYTES]
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        if num_backslashes % 2 and start + len(part) < len(body):
            part = part[:-1]
        start += len(part)
        yield part


@dataclass(frozen=True, slots=True)
class ShortenedBody:
    """A JSON text in which short names stand for the long texts."""

    body: bytes
    texts: dict[str, str] = field(default_factory=dict)
    """The long texts by their names, which no request can guess."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """Begin of each name in `body`, and the bytes that it saves."""

    def restored(self, value: Any) -> Any:
        """Return a decoded value with the long texts in their places; structs and lists are changed themselves."""
        if isinstance(value, str):
            return self.texts.get(value, value)
        if isinstance(value, list):
            for index, item in enumerate(value):
                if not isinstance(item, int | float):
                    value[index] = self.restored(item)
        elif isinstance(value, dict):
            return {self.restored(key): self.restored(item) for key, item in value.items()}
        elif isinstance(value, tuple):
            return tuple(map(self.restored, value))
        elif isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                msgspec.structs.force_setattr(value, name, self.restored(getattr(value, name)))
        return value

    def worded(self, message: str, most_chars: int) -> str:
        """Return a decoder's message as for the whole text; of long texts it repeats the first `most_chars` characters."""
        for name, text in self.texts.items():
            message = message.replace(name, text[:most_chars])
        return _moved(message, lambda place: place + sum(saved for start, saved in self.cuts if start < place))


def check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError for a text that is not valid UTF-8, with the position in `body`."""
    start = 0
    while start < len(body):
        end = _whole_characters(body, start, len(body))
        try:
            body[start:end].decode()
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError("utf-8", body, start + error.start, start + error.end, error.reason) from None
        start = end


def half_a_pair(body: bytes) -> str | None:
    """Return what is wrong with a text in which an escape is half of a pair of surrogates; None if none is."""
    start, end = -1, 0
    while start < end:
        start = end
        whole = _WHOLE_ESCAPES.match(body, start, start + PART_BYTES)
        end = start if whole is None else whole.end()
        if (half := _HALF_A_PAIR.match(body, end)) is not None:
            return f"JSON is malformed: `{half[0].decode()}` is half of a surrogate pair (byte {end})"
    return None


def shorten_texts(body: bytes) -> ShortenedBody:
    """Return a JSON text in UTF-8 with names for its long texts. Raises msgspec.DecodeError for a wrong escape in one."""
    mark = secrets.token_hex(16)
    pieces: list[bytes] = []
    short = ShortenedBody(body)
    copied = length = 0
    for start, end in _long_texts(body):
        name = f"{mark}-{len(pieces)}"
        short.texts[name] = _decoded(body, start, end)
        pieces += [body[copied:start], name.encode()]
        length += start - copied
        short.cuts.append((length, end - start - len(name)))
        length += len(name)
        copied = end
    return replace(short, body=b"".join((*pieces, body[copied:]))) if pieces else short


def _long_texts(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the long texts of a JSON text, between their quotation marks."""
    start, opened = 0, -1
    for part in _parts(body):
        marks = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        num_quotes = marks.count(b'"')
        if num_quotes and opened >= 0:
            end = start + marks.find(b'"')
            if end - opened > PART_BYTES:
                yield opened, end
        if (num_quotes + (opened >= 0)) % 2 == 0:
            opened = -1
        elif num_quotes:
            opened = start + marks.rfind(b'"') + 1
        start += len(part)


def _decoded(body: bytes, start: int, end: int) -> str:
    """Return the text between two quotation marks."""
    parts: list[str] = []
    while start < end:
        stop = _part_end(body, start, end)
        try:
            parts.append(_TEXT.decode(b'"%b"' % body[start:stop]))
        except msgspec.DecodeError as error:
            raise msgspec.DecodeError(_moved(str(error), partial(add, start - 1))) from None
        start = stop
    return "".join(parts)


def _part_end(body: bytes, start: int, end: int) -> int:
    """Return the end of the part that begins at `start`; it cuts no character and no escape in two."""
    stop = _whole_characters(body, start, end)
    if stop == end:
        return end
    tail = body[start:stop].replace(b"\\\\", b"__")[-_LONGEST_ESCAPE:]
    cut_off = _ESCAPE_AT_END.search(tail)
    assert cut_off is not None, "the pattern matches the empty text at the end"
    return stop - len(cut_off[0])


def _whole_characters(body: bytes, start: int, end: int) -> int:
    """Return the end of a part that begins at `start` and cuts no character in two."""
    stop = most = min(start + PART_BYTES, end)
    while most - 3 < stop < end and body[stop] & 0xC0 == 0x80:
        stop -= 1
    return stop


def _moved(message: str, move: Callable[[int], int]) -> str:
    """Return a decoder's message with the position that it names moved."""
    return _POSITION.sub(lambda found: f"(byte {move(int(found[1]))})", message)


def decode_numbers(raw: bytes, *, integers: bool = False) -> list[Any] | None:
    """Return the JSON list of numbers, or of lists of numbers, that `raw` is; None if it is anything else.

    integers: return None for a list with other items than integers.
    """
    text = raw.strip()
    if text[:1] != b"[" or text[-1:] != b"]" or text.translate(None, _NUMERIC):
        return None
    end = b"," if text.find(b"[", 1) < 0 else b"]"
    found: list[Any] = []
    start, stop = 1, len(text) - 1
    try:
        while start < stop:
            cut = text.find(end, start + PART_BYTES, stop)
            if cut < 0:
                cut = stop
            elif end == b"]":
                cut += 1
            part = _LIST.decode(b"[%b]" % text[start:cut])
            if integers and not set(map(type, part)) <= {int}:
                return None
            found += part
            start = text.find(b",", cut, stop) + 1 or stop
    except msgspec.DecodeError:  # cut within a list of lists, or no JSON: the whole decides
        return None
    return found
