"""One running server: its process tree, from the command to the last process killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from benchmarks import processes
from benchmarks.peers.environment import last_error
from benchmarks.peers.peer import HOST, Launch, PeerUnavailableError
from jaxserve.tools.bench.startup import http_get

POLL_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 30.0
FIRST_REPLY_TIMEOUT_S = 300.0


class Server:
    """Started by `with`, and gone with all its processes after it."""

    def __init__(self, label: str, launch: Launch, port: int, *, log: Path, start_timeout_s: float) -> None:
        self.label = label
        self.launch = launch
        self.url = f"http://{HOST}:{port}"
        self.ready_s = 0.0
        """Seconds from the command to the first 200 of its health check."""
        self.first_reply_s = 0.0
        """Seconds from the command to the first token."""
        self._port = port
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        """Raises PeerUnavailableError when it ends, stays silent or refuses the first request."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except PeerUnavailableError as error:
            self._stop()
            raise PeerUnavailableError(f"{self.label}: {error}") from error
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def tree(self) -> list[processes.Stat]:
        """Its processes now."""
        assert self._process is not None, "the server is not started"
        return processes.tree_of(self._process.pid, processes.all_processes())

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        return sum(each.cpu_s for each in self.tree())

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        started_s = time.perf_counter()
        with self._log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self.launch.command,
                    env={**os.environ, **self.launch.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerUnavailableError(f"{self.launch.command[0]}: {error.strerror}") from error
        while http_get(self._port, self.launch.ready_path)[0] != 200:
            elapsed_s = time.perf_counter() - started_s
            if not self.is_alive():
                raise PeerUnavailableError(f"ended before it was ready: {self._last_words()}")
            if elapsed_s > self._start_timeout_s:
                raise PeerUnavailableError(f"not ready after {elapsed_s:.0f} s: {self._last_words()}")
            time.sleep(POLL_INTERVAL_S)
        self.ready_s = time.perf_counter() - started_s
        self._first_reply()
        self.first_reply_s = time.perf_counter() - started_s

    def _first_reply(self) -> None:
        body = {
            "model": self.launch.model,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 1,
            **{name: value for name, value in self.launch.extra_body.items() if value is not None},
        }
        connection = http.client.HTTPConnection(HOST, self._port, timeout=FIRST_REPLY_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise PeerUnavailableError(f"no reply to the first request: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise PeerUnavailableError(f"answered {response.status} to the first request: {text[:200]}")

    def _last_words(self) -> str:
        return f"{last_error(self._log.read_text(errors='replace'))} (see {self._log})"

    def _stop(self) -> None:
        """Ask the first process to end, then kill whatever is left of the tree."""
        process = self._process
        if process is None:
            return
        # It leads a session, as does every process of the tree that left it: these have no other processes.
        sessions = {each.session for each in self.tree()} | {process.pid}
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        # Until their memory and ports are free again.
        deadline_s = time.perf_counter() + STOP_TIMEOUT_S
        while left := [each for each in processes.all_processes() if each.session in sessions]:
            for each in left:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            if time.perf_counter() > deadline_s:
                break  # the kernel is still busy with them
            time.sleep(POLL_INTERVAL_S)
        process.wait()
        self._process = None
