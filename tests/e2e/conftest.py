"""One real server and its program cache for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.http_server import Server
from tests.e2e.real_server import BATCH_PROGRAMS, serving_tiny
from tests.programs import shared_programs


@pytest.fixture(scope="session")
def programs() -> Path:
    """The program cache that all servers and engines of the run share."""
    return shared_programs()


@pytest.fixture(scope="module")
def real_server(programs: Path) -> Iterator[Server]:
    """The tiny model, up to 16 requests at a time; nothing may be compiled while it serves."""
    with serving_tiny(*BATCH_PROGRAMS, programs=programs) as server:
        yield server
        server.await_metric("num_requests_running", 0)
        assert server.metric('compilations_total{engine="0",model_name="tiny",phase="serving"') == 0
        assert "Traceback" not in server.output, server.output
