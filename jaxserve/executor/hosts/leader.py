"""The leader's end of the control channel. Its socket belongs to a thread of its own; other threads hand it messages."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final

import msgspec
import zmq

from jaxserve.config import HostsConfig
from jaxserve.config.hosts import coordinator_address
from jaxserve.errors import ConfigError, StartupError
from jaxserve.executor.hosts.exchanges import Exchanges
from jaxserve.executor.hosts.members import HostLostError, Members, RefusedError
from jaxserve.executor.hosts.messages import (
    TO_LEADER,
    Agreed,
    Alive,
    Failed,
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
from jaxserve.executor.hosts.plan_socket import PlanSocket
from jaxserve.executor.hosts.sockets import (
    BEATS,
    SHOW_S,
    START_TIMEOUT_S,
    bind,
    free_port,
    join_program,
    resolve_host,
    tcp_socket,
)

_LOG = logging.getLogger(__name__)
_LEAVE_S: Final = 2.0
"""Time that workers have to answer the last message."""
_FLUSH_S: Final = 0.5
"""Time that the last messages have to cross the network."""


class Leader:
    """Host 0 of an engine over several hosts. Implements `Hosts`."""

    rank = 0

    def __init__(self, config: HostsConfig, shared_settings: Mapping[str, str]) -> None:
        """Listen for workers. Raises ConfigError. shared_settings: see `agreement.shared_settings`."""
        host, port = coordinator_address(config)
        address, setting = resolve_host(host, port), f"--coordinator {host}:{port}"
        self._config = config
        self._context = zmq.Context()
        self._control = tcp_socket(self._context, zmq.ROUTER)
        try:
            bind(self._control, address, port, setting)
            self.plans = PlanSocket(address, setting)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._address = address
        self._welcome: Welcome | None = None
        """The answer to all workers, once they have joined."""
        self.members = Members(config.num_hosts, shared_settings)
        self._exchanges = Exchanges(config.num_hosts)
        self._outbox: SimpleQueue[ToWorker] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._ignored: set[str] = set()
        """Processes that wanted to join late."""
        self._joined: Future[None] = Future()
        self._all_left_s = float("inf")
        """Time at which the last worker has left."""
        self._num_beats = BEATS * max(1, round(START_TIMEOUT_S / config.host_timeout))
        self._last: Refused | Restart | Stop | None = None
        """The last message to the workers, once the engine ends."""
        self._loss: str | None = None
        self.lost: Future[str] = Future()
        """The reason, once a worker is gone and the others know."""
        self.failed: Future[StartupError] = Future()
        """The reason, once this engine cannot start: host 0 may be in a collective that no other host joins."""
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def gather(self, progress: Callable[[int, int], None]) -> None:
        """Wait until all workers have joined; the log repeats which have not. Raises StartupError.

        progress: called with (hosts, hosts in all).
        """
        started_s, num_shown = time.monotonic(), 0
        while not self._joined.done():
            progress(1 + len(self.members.all), self._config.num_hosts)
            waited_s = time.monotonic() - started_s
            if waited_s > (num_shown + 1) * SHOW_S:
                num_shown += 1
                _LOG.warning("waiting for %s since %.0f s", self.members.missing, waited_s)
            if waited_s > self._config.host_join_timeout:
                raise StartupError(
                    f"{self.members.missing} did not join within {self._config.host_join_timeout:g} s "
                    "(--host-join-timeout)"
                )
            with contextlib.suppress(TimeoutError):
                self._joined.result(0.5)
        self._joined.result()
        progress(self._config.num_hosts, self._config.num_hosts)

    def connect(self) -> None:
        """Join the hosts' program."""
        assert self._welcome is not None, "all workers have joined"
        join_program(self._config, self._welcome.coordinator)

    def exchange(self, topic: str, values: dict[str, str]) -> Sequence[Mapping[str, str]]:
        """See `Hosts`."""
        complete = self._exchanges.add(0, topic, values)
        if complete is not None:
            self._send(Agreed(topic, complete))
        return self._exchanges.wait(topic)

    def serve(self, on_lost: Callable[[str], None]) -> None:
        """Wait until every worker reads plans; from now on call `on_lost`, in another thread, when a worker is gone.

        Raises StartupError if a worker is gone or cannot connect before.
        """
        self.plans.await_workers(self.members.all, self.failed, START_TIMEOUT_S)
        self._num_beats = BEATS
        self.lost.add_done_callback(lambda lost: on_lost(lost.result()))

    def end(self, message: Refused | Restart | Stop) -> None:
        """Send the last message to all workers, and wait a moment for their last words. A second call has no effect."""
        if self._last is None:
            self._last = message
            self._send(message)
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S + _FLUSH_S)

    def close(self) -> None:
        """Release the sockets, after the end."""
        self._thread.join()
        self.plans.close()

    def _send(self, message: ToWorker) -> None:
        self._outbox.put(message)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """Serve the control channel; the thread's work."""
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        interval_s = self._config.host_timeout / BEATS
        beat_s = time.monotonic() + interval_s
        end_s: float | None = None
        while end_s is None or time.monotonic() < min(end_s, self._all_left_s):
            poller.poll(max(0, int(1000 * (beat_s - time.monotonic()))))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            try:
                while self._control.poll(0):
                    identity, *frames = self._control.recv_multipart()
                    self._take(identity, b"".join(frames))
                if time.monotonic() >= beat_s:
                    beat_s = time.monotonic() + interval_s
                    self._tell_all(Alive())
                    self.members.beat(self._num_beats, interval_s)
            except HostLostError as error:
                self._lose(str(error))
            while not self._outbox.empty():
                self._tell_all(self._outbox.get())
            if self._last is not None and end_s is None:
                end_s = time.monotonic() + (0 if isinstance(self._last, Restart) else _LEAVE_S)
        self._control.close(linger=int(1000 * _FLUSH_S))
        self._context.term()
        if self._loss is not None:
            self.lost.set_result(self._loss)

    def _take(self, identity: bytes, frame: bytes) -> None:
        """Handle a worker's message. Raises HostLostError if a worker ends while the engine serves."""
        try:
            message: ToLeader = TO_LEADER.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _LOG.error("ignored a message that is no host's: %s", error)
            return
        if isinstance(message, Join):
            self._take_join(identity, message)
            return
        member = self.members.find(identity)
        if member is None:
            return  # a worker of an engine before this one
        member.num_missed = 0
        match message:
            case Values():
                complete = self._exchanges.add(member.join.rank, message.topic, message.values)
                if complete is not None:
                    self._tell_all(Agreed(message.topic, complete))
            case Alive():
                member.stats = message.stats or member.stats
            case Failed() if self._num_beats == BEATS or not message.is_final:
                raise HostLostError(f"{member.name}: {message.reason}")
            case Failed():
                self._end_start(StartupError(f"{member.name}: {message.reason}"))
            case Left():
                member.has_left = True
                if self._last is None:
                    raise HostLostError(f"{member.name} was stopped")
                if all(each.has_left for each in self.members.all):
                    self._all_left_s = time.monotonic()

    def _take_join(self, identity: bytes, join: Join) -> None:
        try:
            self.members.join(identity, join)
        except RefusedError as error:
            if not self.members.is_closed:
                self._control.send_multipart([identity, encode(Refused(str(error)))])
                self._end_start(ConfigError(str(error)))
            elif join.incarnation not in self._ignored:  # it may follow a host that is gone, which shows in a moment
                self._ignored.add(join.incarnation)
                _LOG.error("a process cannot join an engine that serves: %s", error)
            return
        member = self.members.find(identity)
        if member is not None:
            member.num_missed = 0
        if self.members.is_complete and not self.members.is_closed and not self._joined.done():
            self.members.is_closed = True
            shown = f"[{self._address}]" if ":" in self._address else self._address
            self._welcome = Welcome(f"{shown}:{free_port(self._address)}", self.plans.endpoint)
            self._tell_all(self._welcome)
            self._joined.set_result(None)

    def _end_start(self, error: StartupError) -> None:
        """Have every call that waits for the hosts raise `error`."""
        self._exchanges.fail(error)
        if not self.failed.done():
            self.failed.set_result(error)
        if not self._joined.done():
            self._joined.set_exception(error)

    def _lose(self, reason: str) -> None:
        if self._last is not None:
            return
        self._loss = reason
        self.end(Restart(reason))
        self._end_start(StartupError(f"{reason} while the engine started"))

    def _tell_all(self, message: ToWorker) -> None:
        for member in self.members.all:
            self._control.send_multipart([member.identity, encode(message)])
