"""Errors of records."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import StartupError


class RecordError(StartupError):
    """A file that is no record, or one of another version's form."""

    def __init__(self, reason: str, path: Path | None = None) -> None:
        super().__init__(f"{path or 'the flight record'} cannot be replayed: {reason}")
