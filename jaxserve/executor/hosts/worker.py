"""A worker's end of both channels."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final
from uuid import uuid4

import zmq

from jaxserve.config import HostsConfig
from jaxserve.config.hosts import coordinator_address
from jaxserve.errors import StartupError
from jaxserve.executor.hosts.messages import (
    TO_WORKER,
    Agreed,
    Alive,
    Failed,
    HostStats,
    Join,
    Left,
    Refused,
    Restart,
    Stop,
    ToLeader,
    ToWorker,
    Values,
    Welcome,
    encode,
)
from jaxserve.executor.hosts.plans import Order, decode_order
from jaxserve.executor.hosts.sockets import (
    BEATS,
    SHOW_S,
    START_TIMEOUT_S,
    endpoint,
    join_program,
    resolve_host,
    tcp_socket,
    unreachable,
)

_LOG = logging.getLogger(__name__)
STOPPED: Final = 0
LOST: Final = 1
REFUSED: Final = 2
"""Exit codes of a worker process: the server has stopped, the engine is started again, it cannot start."""
_FLUSH_S: Final = 0.5


class Worker:
    """One host other than host 0. Implements `Hosts`."""

    def __init__(
        self,
        config: HostsConfig,
        host_id: str,
        shared_settings: dict[str, str],
        *,
        on_end: Callable[[int, str], None],
        on_beat: Callable[[], None],
    ) -> None:
        """shared_settings: see `agreement.shared_settings`. on_end: called with (exit code, reason) in another thread when the leader
        ends this worker or is gone. on_beat: called in another thread at every sign of life.

        Raises ConfigError.
        """
        self.rank = config.rank
        host, port = coordinator_address(config)
        self._config = config
        self._join = Join(self.rank, host_id, uuid4().hex, socket.gethostname(), shared_settings)
        self._contexts = zmq.Context(), zmq.Context()
        self._control, self._plans = (tcp_socket(context, zmq.DEALER) for context in self._contexts)
        self._control.connect(endpoint(resolve_host(host, port), port))
        self._on_end, self._on_beat = on_end, on_beat
        self._joined: Future[Welcome] = Future()
        self._exchanges: dict[str, Future[list[dict[str, str]]]] = {}
        self._lock = threading.Lock()
        """Guards `_exchanges`."""
        self._outbox: SimpleQueue[ToLeader] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._num_beats = BEATS * max(1, round(START_TIMEOUT_S / config.host_timeout))
        self._num_missed = 0
        self._has_answer = False
        """True once host 0 has sent something."""
        self._end: tuple[int, str] | None = None
        self._has_last_word = False
        self.stats: Callable[[], HostStats] | None = None
        """Returns the numbers to send, once this worker serves."""
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def gather(self) -> None:
        """Wait until all hosts have joined; the log repeats what is waited for.

        Raises StartupError if they have not within `--host-join-timeout`.
        """
        started_s, limit_s = time.monotonic(), self._config.host_join_timeout
        while True:
            with contextlib.suppress(TimeoutError):
                self._joined.result(max(0.0, min(SHOW_S, started_s + limit_s - time.monotonic())))
                return
            waited_s, setting = time.monotonic() - started_s, f"--coordinator {self._config.coordinator}"
            if waited_s >= limit_s:
                raise StartupError(
                    f"{setting}: no start within {limit_s:g} s (--host-join-timeout): {self._obstacle()}"
                )
            _LOG.warning("%s: waiting since %.0f s: %s", setting, waited_s, self._obstacle())

    def connect(self) -> None:
        """Join the hosts' program."""
        join_program(self._config, self._joined.result().coordinator)

    def exchange(self, topic: str, values: dict[str, str]) -> Sequence[Mapping[str, str]]:
        """See `Hosts`."""
        with self._lock:
            future = self._exchanges.setdefault(topic, Future())
        self._send(Values(topic, values))
        return future.result()

    def serve(self, stats: Callable[[], HostStats]) -> None:
        """Read plans from now on; a leader that is silent for `--host-timeout` counts as gone."""
        self._plans.setsockopt(zmq.ROUTING_ID, str(self.rank).encode())
        self._plans.connect(self._joined.result().plans)
        self._plans.send(b"")
        self.stats = stats
        self._num_beats = BEATS

    def next_order(self) -> Order:
        """Wait for the leader's next plan or command."""
        return decode_order(self._plans.recv())

    def end(self, message: Failed | Left) -> None:
        """Send the last message, and wait until it has left this host."""
        self._has_last_word = True
        self._send(message)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _FLUSH_S)

    def close(self) -> None:
        """Release the sockets, after the end."""
        self._thread.join()
        self._plans.close()
        self._contexts[1].term()

    def _obstacle(self) -> str:
        """Return the reason why this host has not joined yet, in words."""
        if self._has_answer:
            return "host 0 waits for other hosts"
        error = unreachable(*coordinator_address(self._config))
        if error is not None:
            return f"host 0 does not listen there, or cannot be reached: {error}"
        return (
            "the process that listens there does not answer: it is not host 0, or its engine has all its hosts already"
        )

    def _send(self, message: ToLeader) -> None:
        self._outbox.put(message)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """Serve the control channel; the thread's work."""
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        interval_s = self._config.host_timeout / BEATS
        beat_s = time.monotonic()
        while self._end is None and not self._has_last_word:
            poller.poll(max(0, int(1000 * (beat_s - time.monotonic()))))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            while self._end is None and self._control.poll(0):
                self._take(TO_WORKER.decode(self._control.recv()))
            if time.monotonic() >= beat_s:
                beat_s = time.monotonic() + interval_s
                self._beat()
            self._flush()
        if self._end is not None:
            self._send(Left())
        self._flush()
        self._control.close(linger=int(1000 * _FLUSH_S))
        self._contexts[0].term()
        if self._end is not None:
            self._on_end(*self._end)

    def _flush(self) -> None:
        while not self._outbox.empty():
            self._control.send(encode(self._outbox.get()))

    def _beat(self) -> None:
        self._on_beat()
        if not self._joined.done():
            self._control.send(encode(self._join))
            return
        self._control.send(encode(Alive(None if self.stats is None else self.stats())))
        self._num_missed += 1
        if self._num_missed > self._num_beats:
            self._end = LOST, f"host 0 has been silent for {self._config.host_timeout:g} s"

    def _take(self, message: ToWorker) -> None:
        self._num_missed, self._has_answer = 0, True
        match message:
            case Welcome():
                if not self._joined.done():
                    self._joined.set_result(message)
            case Agreed():
                with self._lock:
                    future = self._exchanges.setdefault(message.topic, Future())
                future.set_result(message.values)
            case Refused():
                self._end = REFUSED, message.reason
            case Restart():
                self._end = LOST, message.reason
            case Stop():
                self._end = STOPPED, "the server has stopped"
            case Alive():
                pass
