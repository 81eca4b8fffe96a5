"""The engine's loop: takes messages, runs a step, sends the outputs.

One thread does all of it. While there is work, it listens to the socket between steps until the next one has to be
dispatched, which is at once if steps are short; without work it sleeps in the socket's poll and sends a heartbeat once a
second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from jaxserve.engine.core import BROKEN_ERROR, STOP_ERROR, EngineCore, rejected
from jaxserve.errors import InvalidRequestError
from jaxserve.ipc.messages import (
    Abort,
    AdaptersChanged,
    AddRequest,
    Command,
    CommandDone,
    EngineState,
    ErrorInfo,
    FromEngine,
    Hello,
    LoadedAdapter,
    ModelInfo,
    PagesChanged,
    Ready,
    StepOutputs,
    ToEngine,
)
from jaxserve.ipc.transport import ClientId, EngineSocket, ProtocolError
from jaxserve.scheduler.admission import error_info
from jaxserve.types import RequestId

_log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
_POLL_S: Final = 0.001
"""Resolution of the socket's poll."""
_COPY_S: Final = 0.005
"""The sleep of an idle engine with KV pages that wait for their copy to a tier, or with a command that has not ended."""


class EngineLoop:
    """Connects an EngineCore with its clients."""

    def __init__(
        self, core: EngineCore, socket: EngineSocket, model_info: ModelInfo, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core = core
        self._socket = socket
        self._ready = Ready(model_info)
        self._clock = clock
        self._last_sent = clock()
        self._sent_adapters: list[LoadedAdapter] = []

    def run(self, should_stop: Callable[[], bool]) -> int:
        """Serve until `should_stop` (returns 0) or broken (returns 1). Either way every request gets its terminal message."""
        self._abandon(self._socket.broadcast(self._ready))
        self._publish_adapters()
        is_broken = False
        while not should_stop() and not is_broken:
            try:
                self.turn()
                is_broken = self._core.is_broken
            except Exception:  # a bug: the state is unknown, but clients must not wait
                _log.exception("the engine loop failed")
                is_broken = True
        if is_broken and self._core.flight is not None:
            self._core.flight.try_to_write("crash")
        self._publish(self._core.stop(BROKEN_ERROR if is_broken else STOP_ERROR))
        if self._core.tiers is not None:  # clients do not wait for a slow disk
            self._core.tiers.close()
        return 1 if is_broken else 0

    def turn(self) -> None:
        """Handle messages, then run a step or send a heartbeat."""
        timeout_s = self._core.patience_s() if self._core.has_work else self._idle_s()
        for client, message in self._socket.receive(timeout_s):
            self._receive(client, message)
        if self._core.is_broken:
            return  # a command has found that; a step under way may never end
        if self._core.patience_s() >= _POLL_S:
            return  # more messages may follow before the step is due
        step = self._core.step()
        if step is not None:
            self._publish(step)
        elif self._until_heartbeat() == 0.0:
            self._last_sent = self._clock()
            self._publish_pages()
            self._abandon(self._socket.broadcast(self._core.heartbeat()))

    def _idle_s(self) -> float:
        """Return how long an engine without requests may sleep."""
        is_saving = self._core.tiers is not None and self._core.tiers.is_saving
        is_busy = is_saving or self._core.control.is_busy
        return min(_COPY_S, self._until_heartbeat()) if is_busy else self._until_heartbeat()

    def _until_heartbeat(self) -> float:
        return max(0.0, self._last_sent + HEARTBEAT_S - self._clock())

    def _receive(self, client: ClientId, message: ToEngine | ProtocolError) -> None:
        match message:
            case Hello():
                self._send(client, self._ready)
                if (places := self._core.control.adapters) is not None:
                    self._send(client, AdaptersChanged(places.loaded))
                if (changes := self._core.page_changes) is not None:
                    self._send(client, PagesChanged([*changes.held()]))
            case AddRequest():
                rejections = self._core.handle(message)
                if rejections:  # sent to this client only: another client may own the id
                    self._send(client, StepOutputs(rejections))
                else:
                    self._socket.claim(message.request_id, client)
            case Abort():
                own = [request_id for request_id in message.request_ids if self._socket.owner(request_id) == client]
                if ends := self._core.handle(Abort(own)):
                    self._publish(StepOutputs(ends))
            case Command():
                answer = partial(self._answer, client, message.command_id)
                if not self._core.control.begin(message, answer):
                    answer(self._core.run_command(message.name), self._core.control.state)
            case ProtocolError():
                self._reject(client, message)

    def _answer(self, client: ClientId, command_id: int, error: ErrorInfo | None, state: EngineState) -> None:
        self._publish_adapters()
        self._send(client, CommandDone(command_id, error, state))

    def _reject(self, client: ClientId, error: ProtocolError) -> None:
        _log.error("ignored a frame: %s", error)
        if error.request_id is not None:
            damaged = error_info(InvalidRequestError("The request reached the engine damaged."))
            self._send(client, StepOutputs([rejected(error.request_id, damaged)]))

    def _send(self, client: ClientId, message: FromEngine) -> None:
        """Send to one client; if it is gone, its requests are aborted."""
        self._abandon(self._socket.send(client, message))

    def _publish(self, step: StepOutputs) -> None:
        self._last_sent = self._clock()
        self._publish_pages()
        self._abandon(self._socket.publish(step))

    def _publish_pages(self) -> None:
        """Tell every client which pages the prefix cache has gained and lost since the last call."""
        if (changes := self._core.page_changes) is not None:
            added, removed = changes.take()
            if added or removed:
                self._abandon(self._socket.broadcast(PagesChanged([*added], [*removed])))

    def _publish_adapters(self) -> None:
        """Tell every client which adapters are loaded, if that has changed since the last call."""
        places = self._core.control.adapters
        if places is not None and places.loaded != self._sent_adapters:
            self._sent_adapters = places.loaded
            self._abandon(self._socket.broadcast(AdaptersChanged(places.loaded)))

    def _abandon(self, orphans: list[RequestId]) -> None:
        """Abort requests whose client is gone."""
        if orphans:
            _log.warning("a client is gone, its %d requests are aborted", len(orphans))
            self._core.handle(Abort(orphans))
