"""The API process's side of the engine: which engine there is, whether it takes requests, and who may send some.

Engines come and go; the client stays, with the room for HTTP requests and what was decided for good: that the server
drains, or that there will be no engine any more. Between two engines it says what it says before the first: loading.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from jaxserve.errors import InvalidRequestError, RateLimitError, StartupError, UnavailableError
from jaxserve.frontend.engine_client.connection import LOADING, EngineConnection, Socket
from jaxserve.frontend.engine_client.output_stream import OutputStream
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.ipc.messages import AddRequest, CommandName, EmbeddingInfo, ModelInfo, StartupProgress
from jaxserve.metrics import Metrics


class EngineClient:
    """Whoever asks an engine for something asks here, whichever engine it is."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        max_queued_requests: int,
        max_queued_tokens: int | None = None,
        stall_timeout_s: float,
        peers: PeerProcesses,
        on_progress: Callable[[StartupProgress], None] = lambda progress: None,
    ) -> None:
        self._metrics = metrics
        self._max_queued_requests = max_queued_requests
        self._max_waiting_tokens = None if max_queued_tokens is None else peers.share_of(max_queued_tokens)
        self._stall_timeout_s = stall_timeout_s
        self._peers = peers
        self.note_progress = on_progress
        """Told of every phase of the start; the phases of our own process are given to it as well."""
        self._connection: EngineConnection | None = None
        self._num_admitted = 0
        self._nothing_admitted = asyncio.Event()
        self._nothing_admitted.set()
        self._started = asyncio.Event()
        self._failure: str | None = None
        self._is_draining = False

    @contextlib.asynccontextmanager
    async def connected(self, socket: Socket) -> AsyncIterator[EngineConnection]:
        """Send requests to the engine at `socket` inside the block; those under way end with an error after it."""
        connection = self._connection = EngineConnection(
            socket,
            self._metrics,
            max_waiting_tokens=self._max_waiting_tokens,
            stall_timeout_s=self._stall_timeout_s,
            on_progress=self.note_progress,
            on_ready=self._started.set,
        )
        run = asyncio.create_task(connection.run())
        try:
            yield connection
        finally:
            connection.end()
            self._connection = None
            self._metrics.forget_engine()
            run.cancel()
            await asyncio.wait({run})

    @property
    def model_info(self) -> ModelInfo | None:
        """Of the engine that takes requests; None while there is none."""
        return self._connection.model_info if self._connection is not None and self._connection.is_ready else None

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self.model_info is not None and self._failure is None and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_admitted(self) -> int:
        """Sequences of all HTTP requests under way."""
        return self._num_admitted

    def ailment(self) -> str | None:
        """Why the engine is not healthy; None when it is, or there is none yet."""
        if self._failure is not None:
            return self._failure
        return None if self._connection is None else self._connection.ailment()

    async def wait_started(self) -> ModelInfo:
        """Wait until the first engine is ready. Raises StartupError when it is given up before."""
        await self._started.wait()
        if self.model_info is None:
            raise StartupError(self._failure or "the engine did not start")
        return self.model_info

    def require_ready(self) -> ModelInfo:
        """Return the model's info. Raises UnavailableError while loading, draining or dead."""
        self.require_alive()
        if self._is_draining:
            raise UnavailableError("The server is shutting down.")
        if (model_info := self.model_info) is None:
            raise UnavailableError(LOADING)
        return model_info

    def require_generation(self) -> ModelInfo:
        """The same, of an engine that generates; raises InvalidRequestError where it embeds."""
        model_info = self.require_ready()
        if model_info.embedding is not None:
            raise InvalidRequestError(
                "This server embeds texts (/v1/embeddings, /v1/score, /v1/rerank); its model does not generate.",
                code="unsupported_task",
            )
        return model_info

    def require_embedding(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """The same, of an engine that embeds; raises InvalidRequestError where it generates."""
        model_info = self.require_ready()
        if model_info.embedding is None:
            raise InvalidRequestError(
                "This server generates text; embeddings and scores need one that was started with `--task embed`.",
                code="unsupported_task",
            )
        return model_info, model_info.embedding

    def require_vectors(self) -> tuple[ModelInfo, EmbeddingInfo]:
        """The same, of a model that makes vectors of texts; raises InvalidRequestError where it only scores pairs."""
        model_info, model = self.require_embedding()
        if model.scores_pairs:
            raise InvalidRequestError(
                "This server's model is a cross-encoder: it scores pairs (/v1/score, /v1/rerank) and makes no vectors.",
                code="unsupported_task",
            )
        return model_info, model

    @property
    def max_admitted(self) -> int:
        """Sequences that may be under way: our share of the engine's."""
        return self._peers.share_of(self.require_ready().max_num_seqs + self._max_queued_requests)

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

    def submit(self, requests: Sequence[AddRequest]) -> OutputStream:
        """Return the outputs of `requests`, which are submitted when it is entered.

        Each request gets exactly one output with a `finish_reason`.
        """
        self.require_alive()
        return OutputStream(self._require_connection(), requests)

    async def command(self, name: CommandName) -> None:
        """Have the engine do something for whoever runs the server. Raises RequestError when it does not."""
        self.require_ready()
        await self._require_connection().command(name)

    def _require_connection(self) -> EngineConnection:
        if self._connection is None:
            raise UnavailableError(LOADING)
        return self._connection

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
        if self._connection is not None:
            self._connection.abort_all(message)

    def fail(self, reason: str) -> None:
        """There will be no engine any more: requests under way end with an error. Later calls change nothing."""
        if self._failure is not None:
            return
        self._failure = reason
        self._started.set()
        if self._connection is not None:
            self._connection.end(reason)
