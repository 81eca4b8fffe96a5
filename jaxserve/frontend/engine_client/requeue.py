"""Requests of a server with one engine: those without output outlive it, and are submitted to the next one, once.

No client has seen anything of such a request. A request whose output has begun ends with an error when the engine dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxserve.errors import RateLimitError
from jaxserve.frontend.engine_client.admission import counting_rejections
from jaxserve.frontend.engine_client.connection import EngineConnection, failed_output
from jaxserve.frontend.engine_client.output_stream import OutputStream
from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.metrics import Metrics
from jaxserve.types import RequestId


@dataclass(slots=True)
class _Followed:
    """A request that has not ended."""

    request: AddRequest
    stream: OutputStream
    connection: EngineConnection | None
    """None: it waits for the next engine."""
    is_retried: bool = False
    has_output: bool = False


class RequeuedRequests:
    """Submits requests to the current engine, and to the next one those that the current one has not begun to answer."""

    def __init__(self, connection: Callable[[], EngineConnection], metrics: Metrics) -> None:
        """connection: returns that of the current engine; raises UnavailableError without one."""
        self._connection = connection
        self._metrics = metrics
        self._followed: dict[RequestId, _Followed] = {}
        self._is_closed = False

    def attach(self, stream: OutputStream, requests: Sequence[AddRequest]) -> None:
        """Submit requests; called by `OutputStream`. Raises UnavailableError without an engine, RateLimitError if too much waits."""
        connection = self._connection()
        with counting_rejections(self._metrics):
            connection.attach(stream, requests)
        for request in requests:
            self._followed[request.request_id] = _Followed(request, stream, connection)

    def detach(self, request_ids: Iterable[RequestId]) -> None:
        """Abort requests; called by `OutputStream`."""
        by_connection: dict[EngineConnection, list[RequestId]] = {}
        for request_id in request_ids:
            followed = self._followed.pop(request_id, None)
            if followed is not None and followed.connection is not None:
                by_connection.setdefault(followed.connection, []).append(request_id)
        for connection, own in by_connection.items():
            connection.detach(own)

    def note(self, output: RequestOutput) -> None:
        """Record an output that the engine sent, or the error in its place."""
        if output.finish_reason is not None:
            self._followed.pop(output.request_id, None)
        elif (followed := self._followed.get(output.request_id)) is not None:
            followed.has_output = True

    def retry(self, request_id: RequestId) -> bool:
        """Let a request of an engine that is gone wait for the next one; False if it has had output or was retried."""
        followed = self._followed.get(request_id)
        if self._is_closed or followed is None or followed.has_output or followed.is_retried:
            return False
        followed.is_retried, followed.connection = True, None
        self._metrics.inc("request_retries")
        return True

    def resubmit(self) -> None:
        """Submit the requests that wait to the engine that has just become ready."""
        waiting: dict[OutputStream, list[AddRequest]] = {}
        for followed in self._followed.values():
            if followed.connection is None:
                waiting.setdefault(followed.stream, []).append(followed.request)
        for stream, requests in waiting.items():
            try:
                connection = self._connection()
                with counting_rejections(self._metrics):
                    connection.attach(stream, requests)
            except RateLimitError as error:
                self._end([request.request_id for request in requests], error.message)
                continue
            for request in requests:
                self._followed[request.request_id].connection = connection

    def end_waiting(self, message: str) -> None:
        """End the requests that wait for an engine with an UnavailableError."""
        self._end([key for key, followed in self._followed.items() if followed.connection is None], message)

    def close(self) -> None:
        """Let no request wait from now on: no engine will follow."""
        self._is_closed = True

    def _end(self, request_ids: Iterable[RequestId], message: str) -> None:
        streams: dict[OutputStream, None] = {}
        for request_id in request_ids:
            stream = self._followed.pop(request_id).stream
            stream.put(failed_output(request_id, message))
            streams[stream] = None
        for stream in streams:
            stream.push()
