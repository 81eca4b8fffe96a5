"""Enough of Docker's Engine API for the real docker: it builds from, pushes and runs what it is given, and notes what that was."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Engine:
    """The requests that clients sent to an engine."""

    containers: list[dict[str, Any]] = field(default_factory=list)
    """Descriptions of containers that were made and started."""
    builds: list[tuple[dict[str, list[str]], set[str]]] = field(default_factory=list)
    """Parameters of each build, and the names of the files in its context."""
    pushes: list[str] = field(default_factory=list)
    """Images and tags."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def address_string(self) -> str:
        return "unix"

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self) -> None:
        url, body = urlsplit(self.path), self.body()
        words = url.path.strip("/").split("/")[1:]
        if words[-1:] == ["attach"]:
            self.attach()
            return
        found: Any = {}
        if words == ["containers", "create"]:
            self.engine.containers.append(json.loads(body))
            found = {"Id": "0" * 64, "Warnings": []}
        elif words[-1:] == ["wait"]:
            found = {"StatusCode": 0}
        elif words == ["build"]:
            with tarfile.open(fileobj=io.BytesIO(body)) as context:
                names = {member.name for member in context if member.isfile()}
            self.engine.builds.append((parse_qs(url.query), names))
            found = {"stream": "built\n"}
        elif words[-1:] == ["push"]:
            self.engine.pushes.append(f"{'/'.join(words[1:-1])}:{parse_qs(url.query)['tag'][0]}")
        content = json.dumps(found).encode()
        self.send_response(201 if words[-1:] == ["create"] else 204 if words[-1:] == ["start"] else 200)
        self.send_header("Api-Version", "1.48")
        self.send_header("OSType", "linux")
        self.send_header("Builder-Version", "1")
        self.send_header("Content-Type", "application/json")
        if words[-1:] != ["start"]:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and words[-1:] != ["start"]:
            self.wfile.write(content)

    do_GET = do_POST = do_HEAD = do_DELETE = answer

    def attach(self) -> None:
        """Answer as a container that prints nothing."""
        self.send_response(101)
        self.send_header("Content-Type", "application/vnd.docker.raw-stream")
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", "tcp")
        self.end_headers()
        self.close_connection = True


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def running_engine(socket: Path) -> Iterator[Engine]:
    """An engine at a Unix socket, for `DOCKER_HOST`."""
    engine = Engine()
    with _Server(str(socket), type("Handler", (_Handler,), {"engine": engine})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
