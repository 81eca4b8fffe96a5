"""Values that all hosts give for a topic, as the leader collects them from several threads."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

from jaxserve.errors import StartupError
from jaxserve.executor.hosts.sockets import SHOW_S

_LOG = logging.getLogger(__name__)

AllValues = list[dict[str, str]]
"""The values of all hosts, by rank."""


class Exchanges:
    """The exchanges of one start, by topic."""

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        self._values: dict[str, dict[int, dict[str, str]]] = {}
        self._futures: dict[str, Future[AllValues]] = {}
        self._error: StartupError | None = None
        self._lock = threading.Lock()

    def add(self, rank: int, topic: str, values: dict[str, str]) -> AllValues | None:
        """Add a host's values; returns those of all hosts once all are there."""
        with self._lock:
            own = self._values.setdefault(topic, {})
            own[rank] = values
            if len(own) < self._num_hosts:
                return None
            complete = [own[rank] for rank in range(self._num_hosts)]
            future = self._future(topic)
            if not future.done():
                future.set_result(complete)
            return complete

    def wait(self, topic: str) -> AllValues:
        """Wait for the values of all hosts. Raises StartupError if one of them cannot start."""
        with self._lock:
            future = self._future(topic)
        started_s = time.monotonic()
        while True:
            try:
                return future.result(SHOW_S)
            except TimeoutError:
                _LOG.warning(
                    "waiting for %s since %.0f s: %s", self._missing(topic), time.monotonic() - started_s, topic
                )

    def fail(self, error: StartupError) -> None:
        """Have every call of `wait` raise `error`, from now on and for topics without all values."""
        with self._lock:
            self._error = error
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(error)

    def _missing(self, topic: str) -> str:
        """Return the hosts that have not given their values, in words."""
        with self._lock:
            return ", ".join(f"host {rank}" for rank in range(self._num_hosts) if rank not in self._values[topic])

    def _future(self, topic: str) -> Future[AllValues]:
        future = self._futures.setdefault(topic, Future())
        if self._error is not None and not future.done():
            future.set_exception(self._error)
        return future
