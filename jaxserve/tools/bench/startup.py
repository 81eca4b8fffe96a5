"""`jaxserve bench startup`: time of `jaxserve serve` until `/ready`, with an empty and a full compile cache."""

from __future__ import annotations

import http.client
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

POLL_INTERVAL_S = 0.02
STOP_TIMEOUT_S = 60.0
HOST = "127.0.0.1"


class StartFailedError(Exception):
    """The server ended, or was not ready in time."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds since the process was started."""

    listening_s: float
    """Time of the first HTTP answer."""
    ready_s: float
    """Time of the first 200 of `/ready`."""


def measure_startup(
    command: Sequence[str],
    *,
    num_warm: int,
    timeout_s: float,
    changed: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start `command` once with an empty compile cache and `num_warm` times with the filled one.

    A start between them, which is not measured, fills the cache: the first server ends when it is ready, maybe without some of its
    programs. command: `jaxserve serve ...` without `--port` and `--compile-cache`. changed: flags of as many further starts, to see
    whether they find their programs in that cache. environment: None: this process's. Raises StartFailedError.
    """
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        start = partial(_start_once, command, Path(folder), timeout_s, environment)
        cold = start()
        if num_warm:
            start("--warmup", "all")
        warm = [start() for _ in range(num_warm)]
        others = [start(*changed) for _ in range(num_warm if changed else 0)]
    figures = {
        "command": " ".join(command),
        "cold_listening_s": cold.listening_s,
        "cold_ready_s": cold.ready_s,
        "warm_listening_s": [times.listening_s for times in warm],
        "warm_ready_s": [times.ready_s for times in warm],
    }
    if changed:
        figures["changed"] = " ".join(changed)
        figures["changed_listening_s"] = [times.listening_s for times in others]
        figures["changed_ready_s"] = [times.ready_s for times in others]
    return figures


def _start_once(
    command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] | None, *flags: str
) -> StartTimes:
    """Start a server, and end it when it is ready. folder: has its log and the compile cache."""
    port = free_port()
    place = ("--host", HOST, "--port", str(port), "--compile-cache", str(folder / "programs"))
    with started([*command, *flags, *place], port, folder / "server.log", timeout_s, environment=environment) as times:
        return times


@contextmanager
def started(
    command: Sequence[str],
    port: int,
    log: Path,
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    own_session: bool = True,
) -> Iterator[StartTimes]:
    """Start a server on `port` of this machine; the block begins when it is ready. Raises StartFailedError.

    log: file for its output. environment: None: this process's. own_session: False keeps it in this process group, with
    which it is killed.
    """
    with log.open("wb") as output:
        started_s = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )
    try:
        try:
            times = _await_ready(process, port, started_s, timeout_s)
        except StartFailedError as error:
            tail = log.read_bytes()[-2000:].decode("utf-8", "replace").strip()
            raise StartFailedError(f"{error}\n{tail}" if tail else str(error)) from None
        yield times
    finally:
        stop_process(process, STOP_TIMEOUT_S)


def _await_ready(process: subprocess.Popen[bytes], port: int, started_s: float, timeout_s: float) -> StartTimes:
    listening_s: float | None = None
    while (elapsed_s := time.perf_counter() - started_s) < timeout_s:
        status, _ = http_get(port, "/ready")
        if status is not None and listening_s is None:
            listening_s = elapsed_s
        if status == 200 and listening_s is not None:
            return StartTimes(listening_s, time.perf_counter() - started_s)
        if process.poll() is not None:
            raise StartFailedError(f"the server ended with exit code {process.returncode} before it was ready")
        time.sleep(POLL_INTERVAL_S)
    raise StartFailedError(f"the server was not ready after {timeout_s:g} s")


def http_get(port: int, path: str) -> tuple[int | None, bytes]:
    """Return status and body of a GET on this machine; the status is None if no server answers."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return None, b""
    finally:
        connection.close()


def stop_process(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """End a process, and kill it if it still runs after `timeout_s`."""
    process.terminate()
    try:
        process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
