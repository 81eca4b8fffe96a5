"""The relay between clients and replicas: retries while nothing was produced, one error event after that."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence

import pytest

from jaxserve.apis.routes import Route
from jaxserve.http.app import collect_routes
from jaxserve.ray.relay import LOST, Relay
from jaxserve.ray.wire import ReplyHead, ReplyPart, WireRequest
from jaxserve.routing.request import RouteRequest

ROUTES = {route.path: route for route in collect_routes()}
CHAT = ROUTES["/v1/chat/completions"]
REQUEST = WireRequest("POST", CHAT.path, (), b"{}", RouteRequest(num_prompt_tokens=1, num_output_tokens=1))
STREAM = (("Content-Type", "text/event-stream; charset=utf-8"),)
JSON = (("Content-Type", "application/json"),)
DONE = b"data: [DONE]\n\n"


class LostError(Exception):
    """The replica is gone."""


class Replicas:
    """Answers each attempt with the next script; a script's exception ends it."""

    def __init__(self, *scripts: Sequence[ReplyPart | Exception]) -> None:
        self.scripts = list(scripts)
        self.requests: list[WireRequest] = []
        self.num_aborted = 0

    async def send(self, request: WireRequest) -> AsyncGenerator[ReplyPart, None]:
        self.requests.append(request)
        script = self.scripts.pop(0)
        try:
            for part in script:
                if isinstance(part, Exception):
                    raise part
                yield part
        except GeneratorExit:
            self.num_aborted += 1
            raise


def head(status: int = 200, headers: tuple[tuple[str, str], ...] = STREAM, replica: str = "a") -> ReplyHead:
    return ReplyHead(status, headers, replica)


async def relayed(replicas: Replicas, route: Route | None = CHAT) -> tuple[int, bytes]:
    relay = Relay(replicas.send, REQUEST, route, (LostError,))
    answer, parts = await relay.open()
    return answer.status, b"".join([part async for part in parts])


def errors_in(data: bytes) -> list[str]:
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line.startswith(b'data: {"error"')]
    return [json.loads(event)["error"]["message"] for event in events]


async def test_bytes_pass_unchanged() -> None:
    events = [b": keep-alive\n\n", b'data: {"a":1}\n\nda', b'ta: {"b":2}\n\n', DONE]
    replicas = Replicas([head(), *events])
    assert await relayed(replicas) == (200, b"".join(events))
    assert len(replicas.requests) == 1


@pytest.mark.parametrize(
    "first",
    [
        [LostError()],
        [head(), LostError()],
        [head(), b": keep-alive\n\n", LostError()],
        [head(), b'data: {"error":{"message":"The engine stopped"}}\n\n', DONE],
        [head(503, JSON), b"{}"],
        [head(200, JSON), b'{"half', LostError()],
    ],
)
async def test_request_that_has_produced_nothing_is_retried(first: list[ReplyPart | Exception]) -> None:
    replicas = Replicas(first, [head(replica="b"), b'data: {"b":2}\n\n', DONE])
    status, data = await relayed(replicas)
    assert (status, data.removeprefix(b": keep-alive\n\n")) == (200, b'data: {"b":2}\n\n' + DONE)
    assert len(replicas.requests) == 2


@pytest.mark.parametrize(
    "first",
    [
        [head(503, JSON), b"{}"],
        [ReplyHead.of_no_server("a")],
        [head(200, JSON), LostError()],
        [head(), b": keep-alive\n\n", LostError()],
    ],
)
async def test_retry_avoids_the_replica_that_failed(first: list[ReplyPart | Exception]) -> None:
    replicas = Replicas(first, [head(200, JSON, "b"), b"{}"] if first[0] != head() else [head(replica="b"), DONE])
    await relayed(replicas)
    assert [request.avoid for request in replicas.requests] == [None, "a"]


async def test_a_request_is_retried_once_only() -> None:
    status, data = await relayed(Replicas([LostError()], [LostError()]))
    assert (status, json.loads(data)["error"]["message"]) == (503, LOST)
    status, data = await relayed(Replicas([head(503, JSON), b"1"], [head(503, JSON), b"2"]))
    assert (status, data) == (503, b"2")
    status, data = await relayed(Replicas([ReplyHead.of_no_server("a")], [ReplyHead.of_no_server("b")]))
    assert (status, json.loads(data)["error"]["message"]) == (503, LOST)


@pytest.mark.parametrize("end", [[LostError()], []])
async def test_broken_stream_ends_with_one_error_event_after_whole_events(end: list[Exception]) -> None:
    replicas = Replicas([head(), b'data: {"a":1}\n\ndata: {"ha', *end])
    _, data = await relayed(replicas)
    assert data.startswith(b'data: {"a":1}\n\ndata: {"error"')
    assert data.endswith(DONE) and errors_in(data) == [LOST]
    assert len(replicas.requests) == 1


async def test_stream_that_broke_after_its_end_has_no_error() -> None:
    data = b'data: {"a":1}\n\n' + DONE
    assert await relayed(Replicas([head(), data, LostError()])) == (200, data)


async def test_error_event_has_the_form_of_its_api() -> None:
    begun = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    _, data = await relayed(Replicas([head(), begun, LostError()]), ROUTES["/v1/messages"])
    last = data.removeprefix(begun)
    assert last.startswith(b"event: error\ndata: ") and last.endswith(b"\n\n")
    assert json.loads(last.split(b"data: ")[1])["error"]["message"] == LOST


async def test_client_that_leaves_aborts_the_request() -> None:
    replicas = Replicas([head(), b'data: {"a":1}\n\n', b"data: never\n\n"])
    relay = Relay(replicas.send, REQUEST, CHAT, (LostError,))
    _, parts = await relay.open()
    assert await anext(parts) == b'data: {"a":1}\n\n'
    await relay.close()
    assert replicas.num_aborted == 1
