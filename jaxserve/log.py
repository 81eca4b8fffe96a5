"""Logging of the API and the engine process: one line per event on stderr.

Text that came from outside cannot forge lines (control characters are escaped), a full disk or a closed
pipe never stops serving, and prompts are never logged.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters of the message; the lines of a traceback stay lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", record.getMessage())
        traceback = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        time = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        return f"{time} {record.levelname:<7} {record.name}: {text}{traceback}"


class _PatientHandler(logging.StreamHandler[Any]):
    """Drops a line that cannot be written: the reader of stderr is no reason to stop."""

    def handleError(self, record: logging.LogRecord) -> None:
        return None


def configure_logging(level: str) -> None:
    """Send the records of `jaxserve.*` at `level` and above to stderr, and warnings of everyone else."""
    handler = _PatientHandler(sys.stderr)
    handler.setFormatter(_EscapingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(level.upper())
