"""Counts the values of a JSON body before anything is decoded.

A decoder holds the interpreter's lock until it returns, and takes 50 to 200 ns for each value: a body of 8 MiB may have four
million. Counting takes parts of 64 KiB, between which the lock is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PART_BYTES: Final = 64 << 10
"""Bytes that are counted without giving up the interpreter's lock: about a millisecond for the worst ones."""


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


def may_exceed(num_bytes: int, most: int) -> bool:
    """Return True if a text of this length may have more than `most` values: each takes a byte and a separator."""
    return num_bytes > 2 * most


def count_values(body: bytes, most: int) -> ValueCounts:
    """Count the values of a JSON text, or of its beginning if that has more than `most` containers or keys.

    Of a text that is no JSON, the part before the first mistake is counted.
    """
    num_commas = num_containers = num_keys = 0
    start, is_in_string = 0, False
    while start < len(body) and num_containers <= most and num_keys <= most:
        part = body[start : start + PART_BYTES]
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        if num_backslashes % 2 and start + len(part) < len(body):
            part = part[:-1]  # an escape is not cut in two
        start += len(part)
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[is_in_string::2])
        num_commas += outside.count(b",")
        num_containers += outside.count(b"[") + outside.count(b"{")
        num_keys += outside.count(b":")
        is_in_string ^= len(pieces) % 2 == 0
    return ValueCounts(1 + num_commas + num_containers, num_containers, num_keys)
