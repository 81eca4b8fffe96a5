"""One real server and its program cache for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.http_server import Server
from tests.e2e.real_server import BATCH_PROGRAMS, serving_tiny


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program cache that is empty at first and shared by all servers of the session."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def real_server(programs: Path) -> Iterator[Server]:
    """The tiny model, up to 16 requests at a time; nothing may be compiled while it serves."""
    with serving_tiny(*BATCH_PROGRAMS, programs=programs) as server:
        yield server
        server.await_metric("num_requests_running", 0)
        assert server.metric('compilations_total{engine="0",model_name="tiny",phase="serving"') == 0
        assert "Traceback" not in server.output, server.output
