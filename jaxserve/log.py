"""Logging of the API and the engine process: one line per event on stderr, as text or as JSON.

External text cannot forge lines (control characters are escaped), a full disk or a closed pipe never stops serving, and
prompts are never logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters. The lines of a traceback stay lines, which are indented, as no record is."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        lines = [f"{time} {record.levelname:<7} {record.name}: {_escaped(record.getMessage())}"]
        if record.exc_info:
            lines += [f"  {_escaped(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII, with line ends escaped."""

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
    """Drops a line that cannot be written, so that a closed stderr does not stop the server."""

    def handleError(self, record: logging.LogRecord) -> None:
        return None


def configure_logging(level: str, log_format: Literal["text", "json"] = "text") -> None:
    """Send the records of `jaxserve.*` at `level` and above to stderr, and warnings of all other loggers."""
    handler = _PatientHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _EscapingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(level.upper())


def writes_json() -> bool:
    """Return True if logging is configured to write JSON."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in logging.getLogger().handlers)


def line_of(message: str) -> str:
    """Return `message` as a line of standard output: as a JSON record if all lines are JSON."""
    if not writes_json():
        return message
    return _JsonFormatter().format(logging.LogRecord("jaxserve", logging.INFO, "", 0, message, None, None))


def flush_or_drop() -> None:
    """Write what standard output and standard error still hold, and drop it if that fails.

    Without this, Python tries again when it ends, and replaces the exit status by 120.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def report(level: int, message: str, *, plain: str | None = None) -> None:
    """Print a line on stderr for the user, or log it if all lines are JSON.

    plain: the line to print, if it differs from the message.
    """
    if writes_json():
        logging.getLogger("jaxserve").log(level, "%s", message)
        return
    with contextlib.suppress(OSError):  # stderr is closed
        print(plain or message, file=sys.stderr, flush=True)
