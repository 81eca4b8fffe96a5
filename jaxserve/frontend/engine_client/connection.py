"""The connection to one engine process: the requests submitted to it, their outputs, and its end.

Every submitted request gets exactly one output with a `finish_reason`, also when the engine dies. Leaving an
`OutputStream` aborts what still runs. Nothing here blocks: messages to the engine go through an outbox in order. The
outbox ends with the connection: a restarted engine gets none of them. An aborted request counts until the engine has
answered it, so that clients that come and go do not fill the memory while the engine is frozen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from jaxserve.errors import RateLimitError, StartupError, UnavailableError
from jaxserve.frontend.engine_client.admission import WaitingPrompts
from jaxserve.frontend.engine_client.commands import Commands
from jaxserve.frontend.engine_client.output_stream import OutputStream
from jaxserve.frontend.engine_client.watch import EngineWatch
from jaxserve.ipc.messages import (
    ENGINE_STOPPED,
    STOPPED,
    Abort,
    AdaptersChanged,
    AddRequest,
    CommandDone,
    CommandName,
    CommandOptions,
    EngineState,
    ErrorInfo,
    FromEngine,
    Hello,
    ModelInfo,
    PagesChanged,
    Ready,
    RequestOutput,
    StartupFailed,
    StartupProgress,
    StepOutputs,
    ToEngine,
)
from jaxserve.metrics import Metrics
from jaxserve.types import RequestId

_log = logging.getLogger(__name__)

LOADING = "The model is loading."
MAX_UNANSWERED: Final = 1024
"""Aborted requests that the engine has not answered, beyond which no request is submitted."""


MAX_TOKENS_AT_ONCE: Final = 256
"""Tokens, or log-probabilities, of a message that are handled in one turn of the event loop."""

MAX_SENT_IDS: Final = 1 << 16
"""Most token ids of several prompts that are encoded for the engine in one turn of the event loop: 0.15 ms."""


class Socket(Protocol):
    """A message pipe to the engine; `ipc.transport.ClientSocket` in production. Its maker closes it."""

    async def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine: ...


class RequestLedger(Protocol):
    """Follows requests beyond the end of an engine; RequeuedRequests or RoutedRequests in production."""

    def note(self, output: RequestOutput) -> None:
        """Count an output before its stream gets it."""

    def retry(self, request_id: RequestId) -> bool:
        """Take a request of an engine that is gone, for another one. Return False if it has to end with an error."""


def _stopped() -> UnavailableError:
    return UnavailableError("The engine stopped.")


def failed_output(request_id: RequestId, message: str) -> RequestOutput:
    """Return the terminal output of a request that the engine does not answer: an UnavailableError."""
    return RequestOutput(request_id, [], finish_reason="error", error=ErrorInfo("UnavailableError", message))


def _parts(message: FromEngine) -> Iterator[FromEngine]:
    """Yield a message in parts that take an event loop a few milliseconds each. The last part has the statistics."""
    if not isinstance(message, StepOutputs) or len(message.outputs) <= 1:
        yield message
        return
    first, weight = 0, 0
    for number, output in enumerate(message.outputs):
        weight += len(output.token_ids)
        if output.logprobs:
            weight += sum(len(scores.top_token_ids) for scores in output.logprobs)
        if weight >= MAX_TOKENS_AT_ONCE and number + 1 < len(message.outputs):
            yield StepOutputs(message.outputs[first : number + 1])
            first, weight = number + 1, 0
    yield StepOutputs(message.outputs[first:], message.stats) if first else message


class EngineConnection:
    """The only user of the socket. Messages move only while `run` is running."""

    def __init__(
        self,
        socket: Socket,
        metrics: Metrics,
        *,
        max_waiting_tokens: int | None,
        stall_timeout_s: float,
        startup_timeout_s: float = 0.0,
        on_progress: Callable[[StartupProgress], None],
        on_ready: Callable[[], None],
        on_pages: Callable[[PagesChanged], None] = lambda pages: None,
        on_adapters: Callable[[AdaptersChanged], None] = lambda changed: None,
        ledger: RequestLedger | None = None,
    ) -> None:
        self._socket = socket
        self._metrics = metrics
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_pages = on_pages
        self._on_adapters = on_adapters
        self._ledger = ledger
        self.waiting = WaitingPrompts(max_waiting_tokens)
        """Prompts of requests without output."""
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._outbox.put_nowait(Hello())
        self._streams: dict[RequestId, OutputStream] = {}
        self._unanswered: set[RequestId] = set()
        """Aborted requests whose terminal message has not arrived: they may lie in the outbox still."""
        self._commands = Commands()
        self._started = asyncio.Event()
        self._over = asyncio.Event()
        self._is_broken = False
        self._is_stopping = False
        """True after the engine has sent its last outputs."""
        self.watch = EngineWatch(stall_timeout_s, startup_timeout_s)
        self.model_info: ModelInfo | None = None
        """Info of the loaded model; None before it is loaded."""
        self.reason: str | None = None
        """The reason why the connection is over, if it is known."""

    @property
    def is_ready(self) -> bool:
        """True if the engine accepts requests."""
        return self.model_info is not None and not self._over.is_set() and not self._is_stopping

    def ailment(self) -> str | None:
        """Return the reason why the engine is not healthy; None if it is, or still loads."""
        if self._is_broken:
            return self.reason
        return self.watch.ailment() if self._streams else None

    async def run(self) -> None:
        """Send and receive until cancelled. A connection that breaks counts as a dead engine."""

        async def send() -> None:
            num_ids = 0
            while True:
                message = await self._outbox.get()
                own = len(message.prompt_token_ids) if isinstance(message, AddRequest) else 0
                if num_ids and num_ids + own > MAX_SENT_IDS:
                    num_ids = 0
                    await asyncio.sleep(0)  # other work of the event loop comes between two long prompts
                await self._socket.send(message)
                num_ids += own

        async def receive() -> None:
            while True:
                message = await self._socket.receive()
                for number, part in enumerate(_parts(message)):
                    if number:
                        await asyncio.sleep(0)  # other work of the event loop comes between two parts
                    if not self._over.is_set():  # else its requests have ended, or belong to the next engine
                        self._dispatch(part)

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send())
                tasks.create_task(receive())
        except* Exception as group:  # whatever it is, no other task receives the engine's messages
            _log.error("the connection to the engine broke", exc_info=group.exceptions[0])
            self._is_broken = True
            self.end("the connection to the engine broke")

    async def wait_started(self) -> ModelInfo:
        """Wait for `Ready`. Raises StartupError with the engine's own line if it cannot start."""
        await self._started.wait()
        if self.model_info is None:
            raise StartupError(self.reason or "the engine did not start")
        return self.model_info

    async def wait_over(self) -> None:
        """Wait until the connection is over."""
        await self._over.wait()

    async def wait_stalled(self) -> None:
        """Wait until a ready engine counts as dead: silent for too long."""
        self.end(await self.watch.wait_silent())

    def attach(self, stream: OutputStream, requests: Sequence[AddRequest]) -> None:
        """Submit requests; called by `OutputStream`. Raises RateLimitError if too many tokens or aborts wait."""
        if not self.is_ready:
            raise UnavailableError(LOADING)
        if len(self._unanswered) >= MAX_UNANSWERED:
            error = RateLimitError(
                f"The engine has not answered {len(self._unanswered)} aborted requests. Please retry later."
            )
            error.reason = "unanswered"
            raise error
        self.waiting.add(requests)
        if not self._streams:
            self.watch.note_work()
        for request in requests:
            self._streams[request.request_id] = stream
            self._outbox.put_nowait(request)

    def detach(self, request_ids: list[RequestId]) -> None:
        """Abort requests; called by `OutputStream`. Their terminal messages are dropped."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._unanswered.add(request_id)
        if request_ids:
            self._outbox.put_nowait(Abort(request_ids))

    async def command(self, name: CommandName, options: CommandOptions) -> EngineState:
        """Send a command and wait for its end. Raises RequestError if the engine rejects it, or has ended or ends before."""
        if self._over.is_set():
            raise _stopped()
        command, end = self._commands.new(name, options)
        self._outbox.put_nowait(command)
        return await end

    def abort_all(self, message: str) -> None:
        """End every running request with an UnavailableError."""
        request_ids = list(self._streams)
        self._end_all(message)
        if request_ids:
            self._outbox.put_nowait(Abort(request_ids))

    def end(self, reason: str | None = None) -> None:
        """End the connection: running requests end with an error, unless the ledger submits them elsewhere. Later calls change nothing."""
        if self._over.is_set():
            return
        self.reason = reason
        self._over.set()
        self._started.set()
        if self._ledger is not None:
            for request_id in list(self._streams):
                if self._ledger.retry(request_id):
                    del self._streams[request_id]
                    self.waiting.remove(request_id)
        self._end_all(STOPPED)
        self._commands.fail(_stopped())

    def _end_all(self, message: str) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self.waiting.remove(request_id)
            output = failed_output(request_id, message)
            if self._ledger is not None:
                self._ledger.note(output)
            stream.put(output)
        for stream in dict.fromkeys(streams.values()):
            stream.push()

    def _dispatch(self, message: FromEngine) -> None:
        self.watch.note(message)
        if isinstance(message, StepOutputs):
            self._deliver(message.outputs)
            if message.stats is not None:
                self._metrics.record_stats(message.stats)
        elif isinstance(message, StartupProgress):
            self._on_progress(message)
        elif isinstance(message, Ready):
            self.model_info = message.model_info
            self._metrics.record_ready(message.model_info)
            self._started.set()
            self._on_ready()
        elif isinstance(message, StartupFailed):
            self.end(message.message)
        elif isinstance(message, CommandDone):
            self._commands.end(message)
        elif isinstance(message, PagesChanged):
            self._on_pages(message)
        elif isinstance(message, AdaptersChanged):
            self._metrics.record_adapters([adapter.name for adapter in message.adapters])
            self._on_adapters(message)
        elif message.stats is not None:
            self._metrics.record_stats(message.stats)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Deliver the outputs of one engine step; an HTTP request with several sequences gets them together."""
        fresh: dict[OutputStream, bool] = {}
        """True: the engine's queue is full for one of the sequences, which rejects the HTTP request."""
        for output in outputs:
            self.waiting.remove(output.request_id)
            if self._ledger is not None:
                if output.error is not None and output.error.code == ENGINE_STOPPED:
                    self._is_stopping = True
                    if self._ledger.retry(output.request_id):
                        self._streams.pop(output.request_id, None)
                        continue
                self._ledger.note(output)
            if output.finish_reason is not None:
                stream = self._streams.pop(output.request_id, None)
                self._unanswered.discard(output.request_id)
            else:
                stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                fresh[stream] = fresh.get(stream, False) or (output.error is not None and output.error.is_rate_limit)
        for stream, is_rejected in fresh.items():
            if is_rejected:
                self._metrics.inc("admission_rejections", reason="queue_full")
            stream.push()
