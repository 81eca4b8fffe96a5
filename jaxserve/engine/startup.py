"""The time before an engine is ready: build the executor, and tell every client how far it is.

Loading and compiling run in a thread of their own; the socket stays with the caller's thread, which
answers greetings with the latest progress and requests with "not yet".
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
from jaxserve.ipc.codec import ProtocolError
from jaxserve.ipc.messages import AddRequest, Hello, StartupFailed, StartupProgress, StepOutputs
from jaxserve.ipc.transport import EngineSocket
from jaxserve.scheduler.admission import error_info

E = TypeVar("E")

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_GREETING_S: Final = 2.0
"""How long news of a failure waits for the first client."""

_LOADING: Final = error_info(UnavailableError("The model is still loading. Please retry later."))


def start_executor(build: Callable[[Progress], E], socket: EngineSocket, should_stop: Callable[[], bool]) -> E | None:
    """What `build` makes; None when told to stop meanwhile (the thread is left behind: exit the process).

    Raises StartupError for whatever `build` raises, after the clients were told.
    """
    news: SimpleQueue[StartupProgress] = SimpleQueue()
    built: Future[E] = Future()

    def run() -> None:
        try:
            built.set_result(
                build(lambda phase, done, total, detail: news.put(StartupProgress(phase, done, total, detail)))
            )
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=run, name="startup", daemon=True).start()
    latest: StartupProgress | None = None
    while not should_stop():
        latest = _broadcast_progress(news, socket) or latest
        _answer(socket, latest, _POLL_S)
        if built.done():
            _broadcast_progress(news, socket)
            error = built.exception()
            if error is None:
                return built.result()
            raise _announced(error, socket) from error
    return None


def _broadcast_progress(news: SimpleQueue[StartupProgress], socket: EngineSocket) -> StartupProgress | None:
    """Send the newest line of each phase; returns the last."""
    by_phase: dict[str, StartupProgress] = {}
    while not news.empty():
        progress = news.get()
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


def _announced(error: BaseException, socket: EngineSocket) -> StartupError:
    """Tell the clients why there will be no engine; waits a moment for the first one to connect."""
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
