"""Decodes long JSON lists of numbers, such as token ids, in parts.

A decoder holds the interpreter's lock until it returns: 40 ms for a million token ids, in which a thread beside the event loop
stops the loop as well. Between two parts the lock is free.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

PART_BYTES: Final = 64 << 10
"""Bytes that are decoded at once: less than a millisecond. A single inner list is never cut."""
_LIST: Final = msgspec.json.Decoder(list[Any])
_NUMERIC: Final = b"0123456789+-.eE, \t\r\n[]"


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
