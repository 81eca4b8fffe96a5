"""The API process's side of the engine: submits requests, hands out their news, knows the engine's state.

Every submitted request gets exactly one output with a `finish_reason`, also when the engine dies. Leaving
a `Generation` aborts whatever of it still runs. Nothing here blocks: messages to the engine go through an
outbox in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from jaxserve.errors import InvalidRequestError, RateLimitError, StartupError, UnavailableError
from jaxserve.ipc.messages import (
    Abort,
    AddRequest,
    CommandDone,
    EmbeddingFacts,
    FromEngine,
    Hello,
    ModelFacts,
    Order,
    Ready,
    RequestFault,
    RequestOutput,
    StartupFailed,
    StartupProgress,
    StepOutputs,
    ToEngine,
)
from jaxserve.metrics import Metrics
from jaxserve.server.commands import Commands
from jaxserve.server.feeding import Consumer, Feeding
from jaxserve.server.siblings import Siblings
from jaxserve.server.waiting import WaitingPrompts
from jaxserve.types import RequestId

_log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 60.0
"""Work under way and no word from the engine for this long: it is sick."""


class Connection(Protocol):
    """A message pipe to the engine; `ipc.transport.EngineConnection` in production. Whoever made it closes it."""

    async def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine: ...


class Generation:
    """The sequences of one HTTP request. Use as a context manager: leaving it aborts what still runs."""

    def __init__(self, client: EngineClient, requests: Sequence[AddRequest]) -> None:
        self._client = client
        self._requests = requests
        self._open = {request.request_id for request in requests}
        self._news: list[RequestOutput] = []
        self._feeding: Feeding | None = None

    def __enter__(self) -> Generation:
        self._client.attach(self, self._requests)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop(*self._open)

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended and nothing is left to take."""
        return not self._open and not self._news

    async def feed(self, consume: Consumer, idle_s: float = 0) -> bool:
        """Give news to `consume` until every sequence has ended or it wants no more; False after `idle_s` without any.

        `consume` runs inside the loop that receives the news: no task wakes up for a token. News that came
        while nobody was fed are given at once. What `consume` raises is raised here.
        """
        with Feeding(consume, idle_s) as self._feeding:
            try:
                self.hand_over()
                return await self._feeding.end()
            finally:
                self._feeding = None

    def put(self, output: RequestOutput) -> None:
        """Called by the client for each piece of news; `hand_over` follows when the message is through."""
        self._news.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.request_id)

    def hand_over(self) -> None:
        """Called by the client: give all news to whoever is being fed, else keep them."""
        feeding = self._feeding
        if feeding is not None and feeding.is_hungry and self._news:
            news, self._news = self._news, []
            feeding.give(news)
            if self.is_finished:
                feeding.stop()

    def stop(self, *request_ids: RequestId) -> None:
        """End sequences whose further output nobody wants."""
        running = [request_id for request_id in request_ids if request_id in self._open]
        self._open.difference_update(running)
        self._client.detach(running)


class EngineClient:
    """The only user of the connection. `run` must be running for anything to move."""

    def __init__(
        self,
        connection: Connection,
        metrics: Metrics,
        *,
        max_queued_requests: int,
        max_queued_tokens: int | None = None,
        siblings: Siblings,
        on_progress: Callable[[StartupProgress], None] = lambda progress: None,
    ) -> None:
        self._connection = connection
        self._metrics = metrics
        self._max_queued_requests = max_queued_requests
        self._siblings = siblings
        self._waiting = WaitingPrompts(None if max_queued_tokens is None else siblings.share_of(max_queued_tokens))
        self.note_progress = on_progress
        """Told of every phase of the start; the phases of our own process are given to it as well."""
        self._outbox: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._generations: dict[RequestId, Generation] = {}
        self._commands = Commands()
        self._num_admitted = 0
        self._nothing_admitted = asyncio.Event()
        self._nothing_admitted.set()
        self._started = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: str | None = None
        self._last_word = time.monotonic()
        self._is_draining = False
        self.facts: ModelFacts | None = None

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self.facts is not None and self._failure is None and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_admitted(self) -> int:
        """Sequences of all HTTP requests under way."""
        return self._num_admitted

    def ailment(self) -> str | None:
        """Why the engine is not healthy; None when it is."""
        if self._failure is not None:
            return self._failure
        if self._generations and time.monotonic() - self._last_word > STALL_TIMEOUT_S:
            return f"the engine has work and has been silent for more than {STALL_TIMEOUT_S:.0f} s"
        return None

    async def run(self) -> None:
        """Send and receive until cancelled. A connection that breaks counts as a dead engine."""
        self._outbox.put_nowait(Hello())
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_loop())
                tasks.create_task(self._receive_loop())
        except* Exception as group:  # whatever it is, without us nobody hears the engine
            _log.error("the connection to the engine broke", exc_info=group.exceptions[0])
            self.fail("the connection to the engine broke")

    async def wait_started(self) -> ModelFacts:
        """Wait for `Ready`. Raises StartupError with the engine's own line when it cannot start."""
        await self._started.wait()
        if self.facts is None:
            raise StartupError(self._failure or "the engine did not start")
        return self.facts

    async def wait_failed(self) -> None:
        """Wait until the engine is given up."""
        await self._failed.wait()

    def require_ready(self) -> ModelFacts:
        """The model's facts; raises UnavailableError while loading, draining or dead."""
        self.require_alive()
        if self.facts is None:
            raise UnavailableError("The model is loading.")
        if self._is_draining:
            raise UnavailableError("The server is shutting down.")
        return self.facts

    def require_generation(self) -> ModelFacts:
        """The same, of an engine that generates; raises InvalidRequestError where it embeds."""
        facts = self.require_ready()
        if facts.embedding is not None:
            raise InvalidRequestError(
                "This server embeds texts (/v1/embeddings, /v1/score, /v1/rerank); its model does not generate.",
                code="unsupported_task",
            )
        return facts

    def require_embedding(self) -> tuple[ModelFacts, EmbeddingFacts]:
        """The same, of an engine that embeds; raises InvalidRequestError where it generates."""
        facts = self.require_ready()
        if facts.embedding is None:
            raise InvalidRequestError(
                "This server generates text; embeddings and scores need one that was started with `--task embed`.",
                code="unsupported_task",
            )
        return facts, facts.embedding

    def require_vectors(self) -> tuple[ModelFacts, EmbeddingFacts]:
        """The same, of a model that makes vectors of texts; raises InvalidRequestError where it only scores pairs."""
        facts, model = self.require_embedding()
        if model.scores_pairs:
            raise InvalidRequestError(
                "This server's model is a cross-encoder: it scores pairs (/v1/score, /v1/rerank) and makes no vectors.",
                code="unsupported_task",
            )
        return facts, model

    @property
    def max_admitted(self) -> int:
        """Sequences that may be under way: our share of the engine's."""
        return self._siblings.share_of(self.require_ready().max_num_seqs + self._max_queued_requests)

    @contextlib.contextmanager
    def admission(self, num_sequences: int) -> Iterator[None]:
        """Hold queue room for the sequences of one HTTP request; raises RateLimitError when there is none.

        The room is our share of the engine's: the server as a whole never takes more than it promises.
        """
        max_requests = self.max_admitted
        if self._num_admitted + num_sequences > max_requests:
            self._metrics.inc("admission_rejections", reason="queue_full")
            raise RateLimitError(
                f"The server is busy: {self._num_admitted} requests are running or waiting and at most "
                f"{max_requests} may (--max-num-seqs + --max-queued-requests). Please retry later."
            )
        self._num_admitted += num_sequences
        self._nothing_admitted.clear()
        try:
            yield
        finally:
            self._num_admitted -= num_sequences
            if self._num_admitted == 0:
                self._nothing_admitted.set()

    def generate(self, requests: Sequence[AddRequest]) -> Generation:
        """News of `requests` once entered; each gets exactly one output with a `finish_reason`."""
        return Generation(self, requests)

    def attach(self, generation: Generation, requests: Sequence[AddRequest]) -> None:
        """Submit; called by `Generation`. Raises RateLimitError where too many tokens wait."""
        self.require_alive()
        try:
            self._waiting.add(requests)
        except RateLimitError:
            self._metrics.inc("admission_rejections", reason="queued_tokens")
            raise
        if not self._generations:
            self._last_word = time.monotonic()
        for request in requests:
            self._generations[request.request_id] = generation
            self._outbox.put_nowait(request)

    def detach(self, request_ids: list[RequestId]) -> None:
        """Abort; called by `Generation`. The terminal messages of these requests find nobody."""
        for request_id in request_ids:
            self._generations.pop(request_id, None)
            self._waiting.remove(request_id)
        if request_ids and self._failure is None:
            self._outbox.put_nowait(Abort(request_ids))

    async def command(self, order: Order) -> None:
        """Have the engine do something for whoever runs the server. Raises RequestError when it does not."""
        self.require_ready()
        command, end = self._commands.new(order)
        self._outbox.put_nowait(command)
        await end

    def require_alive(self) -> None:
        """Raises UnavailableError when the engine is given up."""
        if self._failure is not None:
            raise UnavailableError("The engine is not running.")

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Wait until no HTTP request is under way."""
        await self._nothing_admitted.wait()

    def abort_all(self, message: str) -> None:
        """End every request under way with an UnavailableError."""
        request_ids = list(self._generations)
        self._end_all(message)
        if request_ids and self._failure is None:
            self._outbox.put_nowait(Abort(request_ids))

    def fail(self, reason: str) -> None:
        """The engine is gone for good: requests under way end with an error. Later calls change nothing."""
        if self._failure is not None:
            return
        self._failure = reason
        self._end_all("The engine stopped while the request was running.")
        self._commands.fail(UnavailableError("The engine is not running."))
        self._started.set()
        self._failed.set()

    def _end_all(self, message: str) -> None:
        fault = RequestFault("UnavailableError", message)
        generations, self._generations = self._generations, {}
        for request_id, generation in generations.items():
            self._waiting.remove(request_id)
            generation.put(RequestOutput(request_id, [], finish_reason="error", error=fault))
        for generation in dict.fromkeys(generations.values()):
            generation.hand_over()

    async def _send_loop(self) -> None:
        while True:
            await self._connection.send(await self._outbox.get())

    async def _receive_loop(self) -> None:
        while True:
            self._dispatch(await self._connection.receive())

    def _dispatch(self, message: FromEngine) -> None:
        self._last_word = time.monotonic()
        if isinstance(message, StepOutputs):
            self._deliver(message.outputs)
            if message.stats is not None:
                self._metrics.record_stats(message.stats)
        elif isinstance(message, StartupProgress):
            self.note_progress(message)
        elif isinstance(message, Ready):
            self.facts = message.facts
            self._metrics.record_ready(message.facts)
            self._started.set()
        elif isinstance(message, StartupFailed):
            self.fail(message.message)
        elif isinstance(message, CommandDone):
            self._commands.end(message)
        elif message.stats is not None:
            self._metrics.record_stats(message.stats)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """All news of one engine step; an HTTP request with several sequences hears of them together."""
        fresh: dict[Generation, None] = {}
        for output in outputs:
            self._waiting.remove(output.request_id)
            if output.finish_reason is not None:
                generation = self._generations.pop(output.request_id, None)
            else:
                generation = self._generations.get(output.request_id)
            if generation is not None:
                generation.put(output)
                fresh[generation] = None
        for generation in fresh:
            generation.hand_over()
