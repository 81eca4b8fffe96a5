"""Decodes long base64 texts, such as images and embeddings, in parts.

A call of the decoder holds the interpreter's lock: 30 ms for 8 MiB, in which a thread beside the event loop stops the loop as
well. Between two parts the lock is free.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

PART_CHARS: Final = 256 << 10
"""Characters that are decoded at once, a multiple of 4: about a millisecond."""


def decode_base64(text: str) -> bytes:
    """Return the bytes that `text` says in base64. Raises ValueError for anything else, also for white space."""
    parts = []
    for start in range(0, len(text), PART_CHARS):
        part = text[start : start + PART_CHARS]
        if part.endswith("=") and start + PART_CHARS < len(text):
            raise binascii.Error("padding before the end")
        parts.append(base64.b64decode(part, validate=True))
    return b"".join(parts)
