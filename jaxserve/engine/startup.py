"""Starts an engine: builds the executor, and reports progress to every client.

Loading and compiling run in a second thread; the caller's thread keeps the socket, answers `Hello` with the latest
progress and rejects requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Final, TypeVar

from jaxserve.engine.core import rejected
from jaxserve.errors import StartupError, UnavailableError
from jaxserve.executor.protocol import Progress
from jaxserve.ipc.messages import AddRequest, Hello, StartupFailed, StartupProgress, StepOutputs
from jaxserve.ipc.transport import EngineSocket, ProtocolError
from jaxserve.scheduler.admission import error_info

E = TypeVar("E")

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_GREETING_S: Final = 2.0
"""How long the report of a failure waits for the first client."""

_LOADING: Final = error_info(UnavailableError("The model is still loading. Please retry later."))


def start_executor(build: Callable[[Progress], E], socket: EngineSocket, should_stop: Callable[[], bool]) -> E | None:
    """Return the result of `build`; None if `should_stop` first (then exit the process: the thread still runs).

    Raises StartupError for every error of `build`, after it was sent to the clients.
    """
    reports: SimpleQueue[StartupProgress] = SimpleQueue()
    built: Future[E] = Future()

    def run() -> None:
        try:
            built.set_result(
                build(lambda phase, done, total, detail: reports.put(StartupProgress(phase, done, total, detail)))
            )
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=run, name="startup", daemon=True).start()
    latest: StartupProgress | None = None
    while not should_stop():
        latest = _broadcast_progress(reports, socket) or latest
        _answer(socket, latest, _POLL_S)
        if built.done():
            _broadcast_progress(reports, socket)
            error = built.exception()
            if error is None:
                return built.result()
            raise _failure(error, socket) from error
    return None


def _broadcast_progress(reports: SimpleQueue[StartupProgress], socket: EngineSocket) -> StartupProgress | None:
    """Send the newest line of each phase; returns the last."""
    by_phase: dict[str, StartupProgress] = {}
    while not reports.empty():
        progress = reports.get()
        by_phase.pop(progress.phase, None)
        by_phase[progress.phase] = progress
    for progress in by_phase.values():
        socket.broadcast(progress)
    return next(reversed(by_phase.values()), None)


def _answer(socket: EngineSocket, latest: StartupProgress | None, timeout_s: float) -> None:
    for client, message in socket.receive(timeout_s):
        if isinstance(message, ProtocolError):
            _log.error("ignored a frame: %s", message)
        elif isinstance(message, AddRequest):
            socket.send(client, StepOutputs([rejected(message.request_id, _LOADING)]))
        elif isinstance(message, Hello) and latest is not None:
            socket.send(client, latest)


def _failure(error: BaseException, socket: EngineSocket) -> StartupError:
    """Send the clients the reason of a failed start; waits a moment for the first one to connect."""
    if isinstance(error, StartupError):
        reason = error
    else:
        _log.error("the engine could not start", exc_info=error)
        reason = StartupError(f"the engine could not start: {type(error).__name__}: {_first_line(error)}")
    if not socket.has_clients:
        _answer(socket, None, _GREETING_S)
    socket.broadcast(StartupFailed(str(reason)))
    return reason


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no details")
