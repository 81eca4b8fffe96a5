"""The unit and the commands of the handbook under a real systemd, with clients."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.tools.bench.startup import free_port
from tests.documented_commands import commands_of
from tests.e2e.http_server import ROOT, SOURCES, Server, until
from tests.e2e.real_server import FEW_PROGRAMS, model
from tests.e2e.systemd import running_systemd
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = [pytest.mark.slow, pytest.mark.scale]

HANDBOOK = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
UNIT = re.search(r"^```ini\n(\[Service\]\n.*?)^```$", HANDBOOK, re.M | re.S)
STREAM = {"prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "temperature": 0, "stream": True}


def text_of(events: bytes) -> str:
    """Return the text of a whole stream."""
    lines = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
    assert lines[-1].get("choices", [{}])[0].get("finish_reason") == "length", lines[-1]
    return "".join(line["choices"][0]["text"] for line in lines)


def test_systemctl_starts_reloads_and_stops_the_server_and_streams_end_whole(programs: Path) -> None:
    assert UNIT is not None
    start, reload = (words[1:] for words in commands_of(ROOT / "docs" / "operating.md", "systemctl"))
    program = f'#!/bin/sh\nexec {sys.executable} -m jaxserve.cli.main "$@"\n'
    few = {name[2:].replace("-", "_"): int(value) for name, value in zip(FEW_PROGRAMS[::2], FEW_PROGRAMS[1::2], strict=True)}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jaxserve-test-") as sockets:
        config: dict[str, dict[str, Any]] = {
            "model": {"model": str(model().path)},
            "scheduler": few,
            "server": {"port": free_port(), "uds_dir": sockets},
            "compile": {"compile_cache": str(programs), "cpu_kernels": "xla"},
        }
        files = {"/opt/jaxserve/bin/jaxserve": program, "/etc/jaxserve.yaml": yaml.safe_dump(config)}
        variables = {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"}
        with running_systemd("jaxserve", UNIT[1], files, variables) as systemd:
            if systemd is None:
                pytest.skip("no systemd that root can run in namespaces")
            systemd.control(*start)
            server = Server(systemd.process, port=config["server"]["port"])
            first = systemd.property_of("jaxserve", "MainPID")
            with open_post(server, STREAM) as before:
                head = read_until(before, b'"text"')
                systemd.control(*reload)
                text = text_of(head + read_until(before, b"[DONE]"))
            second = systemd.property_of("jaxserve", "MainPID")
            assert second not in (first, "0") and systemd.property_of("jaxserve", "ActiveState") == "active"
            with open_post(server, STREAM) as running:
                head = read_until(running, b'"text"')
                systemd.control("stop", "--no-block", "jaxserve")
                assert text_of(head + read_until(running, b"[DONE]")) == text
            until(lambda: systemd.property_of("jaxserve", "ActiveState") == "inactive", "it never stopped")
            assert systemd.property_of("jaxserve", "Result") == "success"
            assert systemd.property_of("jaxserve", "NRestarts") == "0"
            assert systemd.log.read_text().count("warm start in") >= 1
