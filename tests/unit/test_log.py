"""Log lines cannot be forged and never stop the server."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from jaxserve.log import configure_logging


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


def test_level_hides_lesser_records(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged(monkeypatch, "x", level="warning") == ""


def test_full_disk_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    configure_logging("info")
    logging.getLogger("jaxserve.test").info("x")
