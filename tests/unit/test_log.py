"""Log lines cannot be forged and never stop the server."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from jaxserve.log import configure_logging, report


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    own = logging.getLogger("jaxserve")
    own_level = own.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    own.setLevel(own_level)


def logged(monkeypatch: pytest.MonkeyPatch, message: str, *arguments: object, level: str = "info") -> str:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging(level)
    logging.getLogger("jaxserve.test").info(message, *arguments)
    return stream.getvalue()


def test_control_characters_cannot_forge_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = logged(monkeypatch, "from %s", "a\nb\x1b[31m\u2028c")
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert r"a\x0ab\x1b[31m\x2028c" in text


def test_what_was_raised_cannot_forge_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    try:
        raise ValueError("why\n2026-01-01 00:00:00 INFO    jaxserve: forged\x1b[31m\u2028not")
    except ValueError:
        logging.getLogger("jaxserve.test").exception("failed")
    first, *traceback = stream.getvalue().split("\n")[:-1]
    assert first.endswith("ERROR   jaxserve.test: failed")
    assert traceback[0] == "  Traceback (most recent call last):"
    assert traceback[-1] == r"  2026-01-01 00:00:00 INFO    jaxserve: forged\x1b[31m\x2028not"
    assert all(line.startswith("  ") for line in traceback)


def test_json_is_one_object_a_line_with_what_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info", "json")
    try:
        raise ValueError("why\u2028not")
    except ValueError:
        logging.getLogger("jaxserve.test").exception("from %s", "a\nb\u2028")
    report(logging.WARNING, "said", plain="jaxserve: said")
    failed, said = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (failed["level"], failed["logger"], failed["message"]) == ("error", "jaxserve.test", "from a\nb\u2028")
    assert failed["exception"].endswith("ValueError: why\u2028not")
    assert datetime.fromisoformat(failed["time"]).tzinfo is not None
    assert (said["level"], said["message"]) == ("warning", "said")


def test_the_report_is_plain_where_logs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("info")
    report(logging.ERROR, "said", plain="jaxserve: said")
    assert stream.getvalue() == "jaxserve: said\n"


def test_level_hides_lesser_records(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged(monkeypatch, "x", level="warning") == ""


def test_full_disk_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    configure_logging("info")
    logging.getLogger("jaxserve.test").info("x")
