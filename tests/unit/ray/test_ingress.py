"""The ingress checks keys and the sizes of bodies before it reads prompts, with Ray's own classes and without a cluster."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("ray", reason="needs `jaxserve[ray]`: make scale-check")

from starlette.requests import Request

from jaxserve.http.app import collect_routes
from jaxserve.http.operations.routing import PAGE_KEY_BYTES
from jaxserve.http.operations.schema import RoutingState
from jaxserve.metrics import Metrics
from jaxserve.ray.deployments import Ingress
from jaxserve.ray.wire import ReplyHead, ReplyPart, WireRequest
from jaxserve.routing.request import page_hashes
from jaxserve.tenants import KeyRecord, Tenant
from tests.e2e.http_server import TOKENIZER

pytestmark = pytest.mark.scale

KEY = "first-key"
MAX_BODY_SIZE = 1024
PAGE_SIZE = 16
PAGE = "https://chat.example.org"
JSON = (("Content-Type", "application/json"),)
STATE = RoutingState(0, 0, 1, PAGE_SIZE, b64encode(b"").decode())


class Engines:
    """Stands for the handle of the replicas, and for each reply."""

    def __init__(self) -> None:
        self.requests: list[WireRequest] = []
        self._parts: list[ReplyPart] = []

    def options(self, **_: Any) -> Engines:
        return self

    def remote(self, request: WireRequest) -> Engines:
        reply = Engines()
        reply._parts = [ReplyHead(200, JSON, "a"), msgspec.json.encode(STATE)]
        if request.target != "/routing":
            self.requests.append(request)
        return reply

    async def __aiter__(self) -> AsyncIterator[ReplyPart]:
        for part in self._parts:
            yield part

    def cancel(self) -> None:
        """Nothing runs."""


class Client:
    """Sends the chunks of a body, again and again if they never end, and counts them."""

    def __init__(self, chunks: Sequence[bytes], *, is_endless: bool = False) -> None:
        self._chunks = list(chunks)
        self._is_endless = is_endless
        self.num_sent = 0

    async def __call__(self) -> dict[str, Any]:
        chunk = self._chunks[self.num_sent % len(self._chunks)]
        self.num_sent += 1
        has_more = self._is_endless or self.num_sent < len(self._chunks)
        return {"type": "http.request", "body": chunk, "more_body": has_more}


def request(client: Client, path: str = "/v1/completions", method: str = "POST", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": raw}
    return Request(scope | {"server": ("localhost", 80), "scheme": "http"}, client)


def ingress(**settings: Any) -> tuple[Ingress, Engines]:
    engines = Engines()
    given = {"model": str(TOKENIZER), "api_key": KEY, "max_body_size": MAX_BODY_SIZE, "cors_allowed_origins": PAGE}
    return Ingress({name: value for name, value in (given | settings).items() if value is not None}, engines), engines


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer other"}, {"x_api_key": "other"}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/messages/", "/unknown"])
async def test_a_request_without_a_key_is_rejected_before_its_body_is_read(path: str, headers: dict[str, str]) -> None:
    served, engines = ingress()
    client = Client([b"a" * 100], is_endless=True)
    reply = await served(request(client, path, origin=PAGE, **headers))
    assert (reply.status_code, client.num_sent, engines.requests) == (401, 0, [])
    assert json.loads(reply.body).get("type") == ("error" if path.startswith("/v1/messages") else None)
    assert "API key" in json.loads(reply.body)["error"]["message"]
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert reply.headers["Access-Control-Allow-Origin"] == PAGE, "so that the page sees the error"


@pytest.mark.parametrize("key", [KEY, None])
async def test_a_body_is_read_up_to_its_largest_size(key: str | None) -> None:
    served, engines = ingress(api_key=key)
    client = Client([b"a" * 100], is_endless=True)
    reply = await served(request(client, authorization=f"Bearer {KEY}"))
    assert (reply.status_code, client.num_sent, engines.requests) == (413, 11, [])
    assert "--max-body-size" in json.loads(reply.body)["error"]["message"]
    client = Client([b"a" * 2000])
    reply = await served(request(client, x_api_key=KEY, content_length="2000"))
    assert (reply.status_code, client.num_sent, engines.requests) == (413, 0, [])
    client = Client([b"a" * 1000, b"a" * 24])
    assert (await served(request(client, api_key=KEY, content_length="1024"))).status_code == 200
    assert engines.requests[0].body == b"a" * MAX_BODY_SIZE


@pytest.mark.parametrize(("method", "path"), [("GET", "/live"), ("GET", "/v1/models"), ("OPTIONS", "/v1/completions")])
async def test_replicas_answer_requests_without_a_body_whether_they_have_a_key_or_not(method: str, path: str) -> None:
    served, engines = ingress()
    client = Client([b"a" * 100], is_endless=True)
    assert (await served(request(client, path, method))).status_code == 200
    assert [(sent.method, sent.target, sent.body) for sent in engines.requests] == [(method, path, b"")]
    assert client.num_sent == 0


def test_routes_with_a_body_are_guarded_and_have_the_method_post() -> None:
    routes = collect_routes()
    assert not [route.path for route in routes if route.method == "POST" and route.is_public]
    assert not [route.path for route in routes if route.method != "POST" and "body" in route.parameters]


async def test_requests_with_a_named_key_are_routed_by_pages_with_its_salt(tmp_path: Path) -> None:
    file, token_ids = tmp_path / "keys.json", list(range(1, 65))
    file.write_text(json.dumps([{"key": "a-key", "name": "a"}]))
    served, engines = ingress(api_key=None, api_key_file=str(file))
    client = Client([json.dumps({"prompt": token_ids}).encode()])
    assert (await served(request(client, authorization="Bearer a-key"))).status_code == 200
    salt = Tenant(KeyRecord(key="a-key", name="a"), Metrics("m")).salt(None)
    pages = page_hashes(np.array(token_ids, np.int32), PAGE_SIZE, salt)
    assert engines.requests[0].route.pages == tuple(page[:PAGE_KEY_BYTES] for page in pages) != ()


@pytest.mark.parametrize(("routing", "text"), [("prefix", ""), ("text-prefix", "Hello")])
async def test_the_policy_that_compares_texts_gets_them(routing: str, text: str) -> None:
    served, engines = ingress(routing=routing)
    client = Client([json.dumps({"prompt": "Hello"}).encode()])
    assert (await served(request(client, authorization=f"Bearer {KEY}"))).status_code == 200
    assert engines.requests[0].route.text == text
