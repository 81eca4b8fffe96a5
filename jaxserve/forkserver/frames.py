"""Frames between a fork server and its owner: the length of the content, the number of the job, the content.

Both numbers have 8 bytes, little-endian. Of each job the owner chooses the number, and the reply has the same one.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER: Final = struct.Struct("<QQ")


def framed(number: int, content: bytes) -> bytes:
    """Return the frame of a job's content, or of its reply's."""
    return HEADER.pack(len(content), number) + content


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def push(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the number and content of each frame that `data` completes."""
        self._pending += data
        found, start = [], 0
        while len(self._pending) >= start + HEADER.size:
            length, number = HEADER.unpack_from(self._pending, start)
            end = start + HEADER.size + length
            if len(self._pending) < end:
                break
            found.append((number, bytes(self._pending[start + HEADER.size : end])))
            start = end
        del self._pending[:start]
        return found
