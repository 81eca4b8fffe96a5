"""A real server process, started and ended by a test, with a fake engine process or that of any command."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = f"{ROOT}:{ROOT / 'kernels'}"
TOKENIZER = ROOT / "tests" / "fixtures" / "tokenizers" / "byte_level"
START_TIMEOUT_S = 240.0
PYTHON = os.environ.get("JAXSERVE_TEST_PYTHON", sys.executable)
"""Interpreter with the server's dependencies; client libraries (tests/clients) have another environment."""


@dataclass
class Server:
    """A server process, its port and its output."""

    process: subprocess.Popen[bytes]
    lines: list[str] = field(default_factory=list)
    port: int = 0
    api_key: str | None = None
    """Sent with every request."""
    reader: threading.Thread = field(default_factory=threading.Thread)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request on a new connection; return the status, the headers (names in lower case) and the body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            data = json.dumps(body) if isinstance(body, dict) else body
            sent = {"Content-Type": "application/json"} if isinstance(body, dict) else {}
            if self.api_key is not None:
                sent["Authorization"] = f"Bearer {self.api_key}"
            connection.request(method, path, data, sent | (headers or {}))
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def metric(self, sample: str) -> float:
        """Return the value of the first sample of /metrics whose line starts with `jaxserve:` + `sample`."""
        text = self.request("GET", "/metrics")[2].decode()
        for line in text.splitlines():
            if line.startswith(f"jaxserve:{sample}"):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no sample {sample}")

    def await_metric(self, sample: str, value: float) -> None:
        """Wait until a sample has this value; the engine's numbers arrive with its next message."""
        until(lambda: self.metric(sample) == value, f"{sample} never became {value}")

    def engine_pid(self) -> int:
        """Return the process of the engine that was started last."""
        return self.child_pid("jaxserve.engine.process")

    def child_pid(self, module: str) -> int:
        """Return the only child process that runs `module`."""
        (pid,) = (pid for pid in children_of(self.process.pid) if module.encode() in command_of(pid))
        return pid

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(30)


def children_of(pid: int) -> list[int]:
    """Return the child processes of `pid`."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> bytes:
    """Return the command line of process `pid`, which is empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def until(condition: Any, complaint: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Poll a condition that no event announces."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, complaint
        pause.wait(0.02)


@contextlib.contextmanager
def launched(command: list[str], folder: Path = ROOT, python_path: str = SOURCES) -> Iterator[Server]:
    """Start a process that may become a server, by default from the checkout, and kill it at the end."""
    environment = os.environ | {"PYTHONPATH": python_path, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    server = Server(process)
    server.reader = threading.Thread(target=_read_lines, args=(server,), daemon=True)
    server.reader.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait()
        server.reader.join(10)


def await_ready(server: Server, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait for the announcement, which names the port."""
    ready = re.compile(r"jaxserve is ready at https?://[^ ]*:(\d+) ")
    until(lambda: server.process.poll() is not None or ready.search(server.output), "not ready", timeout_s)
    match = ready.search(server.output)
    assert match, server.output
    server.port = int(match[1])


def fake_server_command(
    sections: dict[str, dict[str, Any]], fake: dict[str, Any] | None = None, others: Sequence[str] = ()
) -> list[str]:
    """Return the command of a server with the fake engine; `sections` of the config replace their defaults.

    others: names of further models.
    """
    configs = [{"model": {"model": str(TOKENIZER), "served_model_name": name}} | sections for name in ("tiny", *others)]
    return [PYTHON, "-m", "tests.e2e.fake_engine_server", json.dumps(configs), json.dumps(fake or {})]


@contextlib.contextmanager
def started(
    fake: dict[str, Any] | None = None, others: Sequence[str] = (), **sections: dict[str, Any]
) -> Iterator[Server]:
    """A server that may still be loading, on a free port unless one is given; killed at the end."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-test-", ignore_cleanup_errors=True) as sockets:
        server_section = {"port": 0, "uds_dir": sockets} | sections.get("server", {})
        with launched(fake_server_command(sections | {"server": server_section}, fake, others)) as server:
            yield server


@contextlib.contextmanager
def replacing(
    replaced: Server,
    sockets: Path,
    fake: dict[str, Any] | None = None,
    others: Sequence[str] = (),
    *,
    after_drain: bool = False,
    **sections: Any,
) -> Iterator[Server]:
    """A server that is to replace `replaced`, and may still be loading. sockets: the `uds_dir` of both."""
    section = {"port": replaced.port, "uds_dir": str(sockets)} | sections.get("server", {})
    command = fake_server_command(sections | {"server": section}, fake, others)
    with launched([*command, json.dumps({"after_drain": after_drain})]) as successor:
        successor.port = replaced.port
        yield successor


@contextlib.contextmanager
def running(
    fake: dict[str, Any] | None = None, others: Sequence[str] = (), **sections: dict[str, Any]
) -> Iterator[Server]:
    """A ready server."""
    with started(fake, others, **sections) as server:
        await_ready(server)
        yield server


def _read_lines(server: Server) -> None:
    assert server.process.stdout is not None
    with server.process.stdout as output:
        for line in output:
            server.lines.append(line.decode().rstrip("\n"))
