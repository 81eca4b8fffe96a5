"""JSON from a checkpoint: an object or a list of them, bounded in size, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.mapped_file import MAX_HEADER_BYTES, file_size
from jaxserve.errors import CheckpointError, shown


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse the JSON object in `text`; `what` opens the error message."""
    value = _parse(text, what)
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    return parse_object(_read(path), str(path))


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Read the list of JSON objects in a file."""
    value = _parse(_read(path), str(path))
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CheckpointError(f"{path}: expected a list of JSON objects, found {type(value).__name__}")
    return value


def _read(path: Path) -> bytes:
    size = file_size(path)
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_HEADER_BYTES} bytes, found {size}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(text: bytes, what: str) -> Any:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{what}: key {shown(key)}: expected each key once, found a duplicate")
            found[key] = value
        return found

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: expected JSON, found {_reason(error)}") from error


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "too deep nesting"
    if isinstance(error, UnicodeDecodeError):
        return "bytes that are not UTF-8"
    return str(error).splitlines()[0]
