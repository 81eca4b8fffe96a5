"""File descriptors for as many connections as are allowed."""

from __future__ import annotations

import resource
from resource import RLIM_INFINITY

import pytest

from jaxserve.errors import ConfigError
from jaxserve.runtime.server import allow_connections


@pytest.mark.parametrize(
    ("before", "after", "is_reported"),
    [
        ((1024, 1 << 20), (4352, 1 << 20), False),
        ((1024, RLIM_INFINITY), (4352, RLIM_INFINITY), False),
        ((8192, 1 << 20), None, False),
        ((RLIM_INFINITY, RLIM_INFINITY), None, False),
        ((1024, 2048), (2048, 2048), True),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_connections_need(
    before: tuple[int, int],
    after: tuple[int, int] | None,
    is_reported: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    allow_connections(4096)
    assert made == ([] if after is None else [after])
    assert ("need 4352 file descriptors, this process may have 2048 (ulimit -n)" in caplog.text) == is_reported


def test_a_limit_with_which_no_server_starts_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 16))
    with pytest.raises(ConfigError, match=r"may open 16 files \(ulimit -n\)"):
        allow_connections(4096)
