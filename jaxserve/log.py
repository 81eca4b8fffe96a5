"""Logging of the API and the engine process: one line per event on stderr, as text or as JSON.

Text that came from outside cannot forge lines (control characters are escaped), a full disk or a closed
pipe never stops serving, and prompts are never logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters of the message; the lines of a traceback stay lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", record.getMessage())
        traceback = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        time = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        return f"{time} {record.levelname:<7} {record.name}: {text}{traceback}"


class _JsonFormatter(logging.Formatter):
    """One object a line, in ASCII: what would end a line is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _PatientHandler(logging.StreamHandler[Any]):
    """Drops a line that cannot be written: the reader of stderr is no reason to stop."""

    def handleError(self, record: logging.LogRecord) -> None:
        return None


def configure_logging(level: str, log_format: Literal["text", "json"] = "text") -> None:
    """Send the records of `jaxserve.*` at `level` and above to stderr, and warnings of everyone else."""
    handler = _PatientHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _EscapingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(level.upper())


def writes_json() -> bool:
    """Whether logging was configured to."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in logging.getLogger().handlers)


def line_of(message: str) -> str:
    """What stands on standard output for `message`: a record's line, where all lines are to be JSON."""
    if not writes_json():
        return message
    return _JsonFormatter().format(logging.LogRecord("jaxserve", logging.INFO, "", 0, message, None, None))


def tell(level: int, message: str, *, plain: str | None = None) -> None:
    """A line to whoever started this, which is no record of the log unless all lines are to be JSON.

    plain: what stands there otherwise, if it is not the message itself.
    """
    if writes_json():
        logging.getLogger("jaxserve").log(level, "%s", message)
        return
    with contextlib.suppress(OSError):  # nobody reads it
        print(plain or message, file=sys.stderr, flush=True)
