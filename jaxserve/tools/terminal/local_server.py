"""A server for one terminal: it starts and ends with the command, and only the command has its key."""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.errors import JaxserveError
from jaxserve.tools.bench.startup import stop_process

STOP_TIMEOUT_S = 30.0
_READY = re.compile(rb"jaxserve is ready at (https?://\S+)")


class ServerEndedError(JaxserveError):
    """The server could not start; its error is on stderr."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the server ended with exit code {exit_code} before it was ready")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class LocalServer:
    """URL and API key of the server."""

    url: str
    api_key: str


@contextlib.contextmanager
def local_server(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[LocalServer]:
    """Run `jaxserve serve WORDS` on a free port of this machine; it writes progress and errors to stderr.

    Raises ServerEndedError if it ends before it is ready.
    """
    key = secrets.token_urlsafe(16)
    command = [sys.executable, "-m", "jaxserve.cli.internal.child", "serve", "--log-level", "warning", *words]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**environment, "JAXSERVE_API_KEY": key},
        start_new_session=True,  # Ctrl-C stops the reply
    )
    signals = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield LocalServer(_await_ready(process), key)
    finally:
        stop_process(process, STOP_TIMEOUT_S)
        for number, handler in signals.items():
            signal.signal(number, handler)


def _await_ready(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None, "a pipe was asked for"
    for line in process.stdout:
        if found := _READY.search(line):
            return found[1].decode()
    raise ServerEndedError(process.wait())


def _leave(number: int, frame: object) -> None:
    """Leave the block as after an error, which ends the server."""
    raise SystemExit(128 + number)
