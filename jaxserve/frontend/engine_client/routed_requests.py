"""Requests over several engines: each prompt goes to the replica that the router chooses.

A request that has produced nothing when its engine dies is submitted to another engine, once. A request whose output has
begun ends with an error, like every request of a single engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.errors import JaxserveError, RateLimitError, UnavailableError
from jaxserve.frontend.engine_client.admission import counting_rejections
from jaxserve.frontend.engine_client.connection import LOADING
from jaxserve.frontend.engine_client.engines import Engines
from jaxserve.frontend.engine_client.output_stream import OutputStream, PromptPages
from jaxserve.ipc.messages import AddRequest, ModelInfo, RequestOutput
from jaxserve.metrics import Metrics
from jaxserve.routing.replica import ReplicaId, Route
from jaxserve.routing.request import ReplyLengths, RouteRequest, prompt_hashes
from jaxserve.routing.router import Router
from jaxserve.types import RequestId


@dataclass(slots=True)
class _Submitted:
    """One request on its replica."""

    request: AddRequest
    stream: OutputStream
    replica: int
    route: Route
    is_retried: bool
    num_output_tokens: int = 0
    has_output: bool = False


class RoutedRequests:
    """Submits requests to several engines and follows them until they end."""

    def __init__(
        self, engines: Engines, router: Router, metrics: Metrics, max_sequences: Callable[[ModelInfo], int]
    ) -> None:
        """max_sequences: returns this process's share of the requests that one engine may run and queue."""
        self._engines = engines
        self._router = router
        self._metrics = metrics
        self._max_sequences = max_sequences
        self._submitted: dict[RequestId, _Submitted] = {}
        self._lengths = ReplyLengths()
        self._is_closed = False

    def begin(self, replica: int) -> None:
        """Expect an engine of this replica that has cached nothing."""
        self._engines.pages[replica] = self._router.add(_id_of(replica)).pages
        self._router.forget_cache(_id_of(replica))

    def close(self) -> None:
        """Retry no request from now on: the server gives up."""
        self._is_closed = True

    def attach(self, stream: OutputStream, requests: Sequence[AddRequest]) -> None:
        """Submit all of `requests` or none. Choices of one prompt go to one replica. Called by `OutputStream`.

        Raises UnavailableError without a ready engine, RateLimitError if too much waits on all of them.
        """
        groups: dict[int, list[AddRequest]] = {}
        for request in requests:
            groups.setdefault(id(request.prompt_token_ids), []).append(request)
        try:
            with counting_rejections(self._metrics):
                for group in groups.values():
                    self._submit(stream, group)
        except JaxserveError:
            self.detach([request.request_id for request in requests])
            raise

    def detach(self, request_ids: Iterable[RequestId]) -> None:
        """Abort requests; called by `OutputStream`."""
        by_replica: dict[int, list[RequestId]] = {}
        for request_id in request_ids:
            if (submitted := self._end(request_id)) is not None:
                by_replica.setdefault(submitted.replica, []).append(request_id)
        for replica, own in by_replica.items():
            if (connection := self._engines.connections.get(replica)) is not None:
                connection.detach(own)

    def note(self, output: RequestOutput) -> None:
        """Count an output that the engine sent, or the error in its place."""
        submitted = self._submitted.get(output.request_id)
        if submitted is None:
            return
        submitted.has_output = True
        submitted.num_output_tokens += len(output.token_ids)
        if output.finish_reason is None:
            submitted.route.note_output(len(output.token_ids))
        else:
            if output.finish_reason in ("stop", "length"):
                self._lengths.record(submitted.num_output_tokens)
            self._end(output.request_id)

    def retry(self, request_id: RequestId) -> bool:
        """Submit a request of a dead engine to another one; False if it has had output, was retried, or cannot be placed."""
        lost = self._submitted.get(request_id)
        if self._is_closed or lost is None or lost.has_output or lost.is_retried:
            return False
        try:
            self._submit(lost.stream, [lost.request], is_retried=True)
        except (UnavailableError, RateLimitError):
            return False
        lost.route.end()
        self._metrics.inc("request_retries")
        return True

    def _submit(self, stream: OutputStream, group: Sequence[AddRequest], *, is_retried: bool = False) -> None:
        """Submit requests with one prompt to the replica that the router chooses."""
        ready = {_id_of(replica): replica for replica in self._engines.ready()}
        if not ready:
            raise UnavailableError(LOADING)
        wanted = self._route_request(group[0], stream.pages)
        free = {replica_id for replica_id, replica in ready.items() if self._has_room(replica, len(group))}
        ranked = [replica.replica_id for replica in self._router.rank(wanted, free or set(ready))]
        chosen = self._attach_first(stream, group, {replica_id: ready[replica_id] for replica_id in ranked})
        replica = ready[chosen]
        for index, request in enumerate(group):
            num_output_tokens = self._lengths.expected(request.sampling.max_tokens)
            # The choices of a prompt share its pages: only the first has a prompt to compute.
            share = wanted if index == 0 else RouteRequest(num_prompt_tokens=0, num_output_tokens=num_output_tokens)
            route = self._router.commit(share, chosen)
            self._submitted[request.request_id] = _Submitted(request, stream, replica, route, is_retried)

    def _attach_first(
        self, stream: OutputStream, group: Sequence[AddRequest], ranked: Mapping[ReplicaId, int]
    ) -> ReplicaId:
        """Submit requests to the first of `ranked` that takes them. Raises RateLimitError if too much waits on all."""
        for replica_id, replica in ranked.items():
            try:
                self._engines.connections[replica].attach(stream, group)
            except RateLimitError as error:
                full = error
            else:
                return replica_id
        raise full

    def _has_room(self, replica: int, num_sequences: int) -> bool:
        info, load = self._engines.connections[replica].model_info, self._router.replicas[_id_of(replica)]
        return info is not None and load.num_requests + num_sequences <= self._max_sequences(info)

    def _route_request(self, request: AddRequest, known: PromptPages) -> RouteRequest:
        info, prompt = self._engines.models()[0], request.prompt_token_ids
        pages = () if info.embedding is not None else known.get(id(prompt))
        if pages is None:
            pages = prompt_hashes(prompt, info.block_size, request.cache_salt, request.adapter)
        return RouteRequest(
            num_prompt_tokens=len(prompt),
            num_output_tokens=self._lengths.expected(request.sampling.max_tokens),
            pages=pages,
            block_size=info.block_size,
        )

    def _end(self, request_id: RequestId) -> _Submitted | None:
        submitted = self._submitted.pop(request_id, None)
        if submitted is not None:
            submitted.route.end()
        return submitted


def _id_of(replica: int) -> ReplicaId:
    return ReplicaId(str(replica))
