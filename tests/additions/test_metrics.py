"""A metric of the engine is one field of EngineStats and the line that counts it; `/metrics` and the docs have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.additions.overlay import Overlay, unnamed
from tests.e2e.http_server import await_ready, fake_server_command, launched

pytestmark = pytest.mark.slow

FIELD = '    whistles: Annotated[int, MetricSpec("counter", "Times the engine whistled.")] = 0'


def test_a_metric_of_the_engine_is_one_field(overlay: Overlay, tmp_path: Path) -> None:
    overlay.insert("jaxserve/ipc/stats.py", FIELD, before="num_requests_running: Annotated")
    overlay.insert("jaxserve/engine/core.py", "    stats.whistles += 2", before="stats.program_calls += 1")
    assert unnamed(overlay, "a metric of the engine") == {"jaxserve/engine/core.py"}  # the line that counts it
    command = fake_server_command({"server": {"port": 0, "uds_dir": str(tmp_path)}})
    with launched(command, overlay.root, overlay.python_path) as server:
        await_ready(server)
        assert server.metric("whistles_total") == 0
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
        assert server.request("POST", "/v1/completions", body)[0] == 200
        server.await_metric("whistles_total", 2 * server.metric("program_calls_total"))
        assert server.metric("whistles_total") > 0
    overlay.run("-m", "jaxserve.cli.internal.reference", "docs/reference")
    page = (overlay.root / "docs" / "reference" / "metrics.md").read_text("utf-8")
    assert "| `jaxserve:whistles_total` | counter | `model_name`, `engine` | Times the engine whistled. |" in page
