"""`jaxserve serve` on a host other than host 0: runs the worker process, and starts it again when it dies.

SIGTERM, SIGINT   the worker goes on until host 0 has drained, at most `--shutdown-timeout`; a second signal ends it at once
worker dies       another one is started and joins the next engine, at most `--engine-restarts` times within 10 minutes
worker freezes    it counts as dead after twice `--host-timeout` without a sign of life, while it starts after a minute, and after
                  `--startup-timeout` without the first one
exit              0 the server has stopped, 1 the worker died too often, 2 could not start (one line on stderr)
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Final
from uuid import uuid4

from jaxserve.checkpoint.source import resolve_model
from jaxserve.config import Config
from jaxserve.ipc.engine_spec import SERVING_BEAT, HostWorkerSpec
from jaxserve.log import configure_logging
from jaxserve.runtime.engine_supervisor import RestartBudget
from jaxserve.runtime.environment import engine_environment
from jaxserve.runtime.spawn import WORKER_MODULE, Spawned, spawn

_log = logging.getLogger(__name__)
_CANNOT_START: Final = 2
_POLL_S: Final = 0.5
_START_GRACE_S: Final = 60.0
"""Time that a worker may be silent between its first sign of life and serving: drivers and compilers may hold it up."""


def run_host(config: Config) -> int:
    """Run this host's workers until the server stops; returns the exit code. Raises StartupError."""
    with _signals() as signals:
        return run_workers(config, signals)


def run_workers(config: Config, signals: Sequence[int]) -> int:
    """Run this host's workers until the server stops; returns the exit code. Raises StartupError.

    signals: those that were caught so far, as another thread adds to them.
    """
    configure_logging(config.server.log_level, config.server.log_format)
    hosts = config.hosts
    path = resolve_model(config.model)
    _log.info("host %d of %d, host 0 is at %s", hosts.rank, hosts.num_hosts, hosts.coordinator)
    budget, host_id = RestartBudget(config.server.engine_restarts), uuid4().hex
    while True:
        run = _Run(config, str(path), host_id, signals)
        code = run.wait()
        if code in (0, _CANNOT_START) or signals:
            return max(code, 0)
        if not budget.take():
            _log.error("%s; not started again: %s", run.exit_text, budget)
            return 1
        _log.error("%s; starting it again (%s)", run.exit_text, budget)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT inside the block."""
    caught: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: caught.append(number)) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Silence:
    """The time since a worker's last sign of life, in polls of `_POLL_S`: time in which this process does not run is not counted."""

    def __init__(self, startup_timeout_s: float, host_timeout_s: float) -> None:
        self._host_timeout_s = host_timeout_s
        self._num_polls = 0
        self._is_serving = False
        self.limit_s = startup_timeout_s
        """Time after which the worker counts as frozen. Before its first sign of life it imports, on a busy machine for minutes."""

    def end(self, beats: bytes) -> None:
        """Take signs of life."""
        self._num_polls = 0
        self._is_serving |= SERVING_BEAT in beats
        self.limit_s = 2 * self._host_timeout_s if self._is_serving else _START_GRACE_S

    def is_too_long(self) -> bool:
        """Count a poll without a sign of life; return True if the worker counts as frozen."""
        self._num_polls += 1
        return self._num_polls * _POLL_S > self.limit_s


class _Run:
    """One worker process, from its start to its end."""

    def __init__(self, config: Config, path: str, host_id: str, signals: Sequence[int]) -> None:
        self._config = config
        self._signals = signals
        self._beats, beat_descriptor = os.pipe()
        os.set_blocking(self._beats, False)
        os.set_blocking(beat_descriptor, False)
        self._process: Spawned = spawn(
            engine_environment(), module=WORKER_MODULE, descriptors=(beat_descriptor,), preload=True
        )
        os.close(beat_descriptor)
        spec = HostWorkerSpec(config=config, model_path=path, host_id=host_id, beat_descriptor=beat_descriptor)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: `wait` returns the code
            self._process.stdin.write(spec.to_line())
            self._process.stdin.flush()

    def wait(self) -> int:
        """Wait for the end of the process, which is negative for a signal; end it if it freezes or a signal asks for it."""
        silence = Silence(self._config.server.startup_timeout, self._config.hosts.host_timeout)
        stop_s: float | None = None
        with selectors.DefaultSelector() as selector, self._process:
            selector.register(self._beats, selectors.EVENT_READ)
            while self._process.poll() is None:
                if selector.select(_POLL_S):
                    silence.end(self._read_beats())
                elif silence.is_too_long():
                    _log.error("the worker has been silent for more than %g s", silence.limit_s)
                    self._process.kill()
                    self._process.wait()
                if self._signals and stop_s is None:
                    stop_s = time.monotonic() + self._config.server.shutdown_timeout
                    _log.info("waiting for host 0 to stop, at most %g s", self._config.server.shutdown_timeout)
                if stop_s is not None and (len(self._signals) > 1 or time.monotonic() > stop_s):
                    self._process.kill()
                    self._process.wait()
                    os.close(self._beats)
                    return 0
        os.close(self._beats)
        return self._process.returncode

    @property
    def exit_text(self) -> str:
        """Return how the process ended, in words."""
        return f"the worker process {self._process.exit_text}"

    def _read_beats(self) -> bytes:
        """Return the worker's signs of life. At the end of the pipe, which is that of the process, wait for that."""
        beats = os.read(self._beats, 4096)
        if not beats:
            self._process.wait()
        return beats
