"""`jaxserve serve` in processes of its own, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

START_TIMEOUT_S: Final = 600.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """A server on a free port of the loopback interface; it ends with the `with` block."""

    def __init__(self, model: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "jaxserve.cli.main",
            "serve",
            str(model),
            "--warmup",
            "all",
            *flags,
            "--port",
            str(port),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        end_s = time.monotonic() + START_TIMEOUT_S
        try:
            while not self._is_ready():
                if self._process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit("the server did not start")
                time.sleep(0.5)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the reply to a request. Raises HTTPError."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers)) as response:
            return json.load(response)

    def processor_s(self) -> float:
        """Return the processor seconds of the server's processes so far, ended ones included."""
        return sum(map(_processor_s, _tree(self._process.pid)))

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready") as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += [each for child in task.read_text().split() for each in _tree(int(child))]
    return found


def _processor_s(pid: int) -> float:
    """Return the processor seconds of a process and of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, and its parent has its time
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
