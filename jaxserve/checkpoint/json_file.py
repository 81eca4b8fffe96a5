"""JSON from a checkpoint: one object, bounded in size, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.mapped_file import MAX_HEADER_BYTES, file_size, shown
from jaxserve.errors import CheckpointError


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `text`; `what` opens the error message."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{what}: key {shown(key)}: expected each key once, found a duplicate")
            found[key] = value
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: expected JSON, found {_reason(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    size = file_size(path)
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_HEADER_BYTES} bytes, found {size}")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_object(text, str(path))


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "too deep nesting"
    if isinstance(error, UnicodeDecodeError):
        return "bytes that are not UTF-8"
    return str(error).splitlines()[0]
