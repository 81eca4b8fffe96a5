"""The wire itself: sockets, statuses, disconnects, limits."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import Server, running

SLOW = {"device_seconds": 0.01, "vocab_size": 384, "eos_token_ids": []}
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(SLOW) as running_server:
        yield running_server


def open_post(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A connection with one request on it."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    if server.api_key is not None:
        head += f"Authorization: Bearer {server.api_key}\r\n"
    head += "\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        received = connection.recv(65536)
        assert received, data
        data += received
    return data


@pytest.mark.parametrize("is_streamed", [True, False])
def test_disconnect_frees_the_engine_at_once(server: Server, is_streamed: bool) -> None:
    before = server.metric("client_disconnects_total")
    connection = open_post(server, {"prompt": "x", "max_tokens": 1900, "n": 2, "stream": is_streamed})
    if is_streamed:
        read_until(connection, b'"text"')
    server.await_metric("num_requests_running", 2)
    connection.close()
    server.await_metric("num_requests_running", 0)
    server.await_metric("client_disconnects_total", before + 1)
    server.await_metric("kv_cache_usage_perc", 0)


def read_to_the_end(connection: socket.socket) -> bytes:
    data = b""
    while received := connection.recv(65536):
        data += received
    return data


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_closes_only_its_sending_side_gets_its_reply(server: Server, is_streamed: bool) -> None:
    body = {"prompt": "x", "max_tokens": 40, "stream": is_streamed}
    with open_post(server, body) as connection:
        connection.shutdown(socket.SHUT_WR)
        reply = HTTPResponse(connection)
        reply.begin()
        text = reply.read()
        assert (reply.status, connection.recv(1)) == (200, b""), "the reply was the connection's last"
    lines = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: {")] if is_streamed else [text]
    assert json.loads(lines[-1])["choices"][0]["finish_reason"] == "length"


def test_a_client_that_closes_the_rest_of_its_connection_later_has_left(server: Server) -> None:
    before = server.metric("client_disconnects_total")
    with open_post(server, {"prompt": "x", "max_tokens": 1900}) as connection:
        connection.shutdown(socket.SHUT_WR)
        read_until(connection, b"100 Continue")
    server.await_metric("client_disconnects_total", before + 1)
    server.await_metric("num_requests_running", 0)


def test_pipelined_requests_before_a_half_close_are_answered(server: Server) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_to_the_end(connection).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
        b"GET /v1/models HTTP/1.1\r\nHost: local",
    ],
)
def test_a_half_close_inside_a_request_ends_the_connection(server: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert b"200 OK" not in read_to_the_end(connection)


def test_reader_that_does_not_read_holds_up_no_other(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1500, "stream": True, "logprobs": 20, "n": 4}
    stalled = open_post(server, body)
    read_until(stalled, b'"text"')
    status, _, data = server.request("POST", "/v1/completions", {"prompt": "y", "max_tokens": 20})
    assert status == 200
    assert json.loads(data)["usage"]["completion_tokens"] == 20
    stalled.close()
    server.await_metric("num_requests_running", 0)


def test_status_lines_of_refusals(server: Server) -> None:
    for method, path, body, headers, status in (
        ("GET", "/nowhere", None, {}, 404),
        ("GET", "/v1/completions", None, {}, 405),
        ("POST", "/v1/completions", b"x" * (9 << 20), {"Content-Type": "application/json"}, 413),
        ("POST", "/v1/completions", b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/v1/completions", {"prompt": "x"}, {"Content-Encoding": "gzip"}, 415),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": 3}, {}, 400),
        ("POST", "/v1/completions", {"prompt": "x", "model": "y"}, {}, 404),
    ):
        found, sent, data = server.request(method, path, body, headers)
        assert found == status, (method, path)
        assert sent["content-type"].startswith("application/json")
        assert json.loads(data)["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "headers_too_large"),
        (b"nonsense\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA b: c\r\n\r\n", 400, "invalid_http"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "invalid_http",
        ),
    ],
)
def test_malformed_http_is_refused_in_openais_form(server: Server, raw: bytes, status: int, code: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(raw)
        reply = read_until(connection, b"}}")
    assert b" %d " % status in reply.splitlines()[0]
    assert b"\r\nServer: jaxserve\r\n" in reply
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == code
    assert ": " in error["message"] or code != "invalid_http", "what is wrong with it"
    assert server.request("GET", "/health")[0] == 200
    assert "Traceback" not in server.output


@pytest.mark.parametrize("path", ["/health", "/nowhere"])
def test_an_unknown_expectation_is_refused(server: Server, path: str) -> None:
    status, headers, _ = server.request("GET", path, headers={"Expect": "the unexpected", "X-Request-Id": "mine"})
    assert (status, headers["x-request-id"]) == (417, "mine")
    assert "Traceback" not in server.output


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/v1/models", 200), ("/v1/completions", 405)])
def test_head_is_get_without_a_body(server: Server, path: str, status: int) -> None:
    found, headers, data = server.request("HEAD", path)
    _, expected, body = server.request("GET", path)
    assert (found, data) == (status, b"")
    assert body
    if status == 200:
        assert headers["content-length"] == expected["content-length"] == str(len(body))
        assert headers["content-type"] == expected["content-type"]


def test_websocket_upgrade_is_ignored(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_request_id_is_echoed_on_streams_and_errors(server: Server) -> None:
    for body in ({"prompt": "x", "max_tokens": 1}, {"prompt": "x", "max_tokens": 1, "stream": True}, {"prompt": ""}):
        _, headers, _ = server.request("POST", "/v1/completions", body, {"X-Request-Id": "mine-1"})
        assert headers["x-request-id"] == "mine-1"
    _, headers, _ = server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "request_id": "mine-2"})
    assert headers["x-request-id"] == "mine-2"
    assert len(server.request("GET", "/version")[1]["x-request-id"]) == 32


def test_connection_is_kept_and_reused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        for _ in range(3):
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b'"version"' in read_until(connection, b"}")


def test_metrics_count_what_was_served(server: Server) -> None:
    before = server.metric('request_success_total{engine="0",finished_reason="length"')
    server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 5, "n": 2})
    assert server.metric('request_success_total{engine="0",finished_reason="length"') == before + 2
    assert server.metric("generation_tokens_total") >= 10
    assert server.metric("time_to_first_token_seconds_count") >= 2
    for part in ("queue", "prefill", "decode", "inference"):
        assert server.metric(f"request_{part}_time_seconds_count") >= 2, part
    assert server.metric('compilations_total{engine="0",model_name="tiny",phase="serving"') == 0
    assert server.metric('compilations_total{engine="0",model_name="tiny",phase="warmup"') > 0


@pytest.mark.slow
def test_key_guards_the_server_and_is_shown_nowhere() -> None:
    with running(server={"api_key": "secret,other"}) as guarded:
        assert guarded.request("GET", "/health")[0] == 200
        assert guarded.request("GET", "/ready")[0] == 200
        for path in ("/metrics", "/v1/models", "/docs"):
            assert guarded.request("GET", path)[0] == 401
        assert guarded.request("POST", "/tokenize", {"prompt": "x"})[0] == 401
        assert guarded.request("POST", "/tokenize", {"prompt": "x"}, KEY)[0] == 200
        assert "secret" not in guarded.output
        assert "$JAXSERVE_API_KEY" in guarded.output


@pytest.mark.slow
def test_settings_of_keys_limits_and_pages_reach_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# team\nsecret\n")
    page = "https://chat.example.org"
    settings = {
        "api_key_file": str(tmp_path / "keys"),
        "cors_allowed_origins": page,
        "strict_parameters": True,
    }
    connection = {"max_request_line": 1024}
    with running(server=settings, limits={"max_choices": 2}, connection=connection) as server:
        assert server.request("GET", "/v1/models")[0] == 401
        assert "$JAXSERVE_API_KEY" in server.output
        status, headers, data = server.request(
            "POST", "/v1/completions", {"prompt": "x", "n": 3}, KEY | {"Origin": page}
        )
        assert status == 400
        assert b"1 to 2 (--max-choices), got 3" in data
        assert headers["access-control-allow-origin"] == page
        assert server.request("POST", "/v1/completions", {"prompt": "x", "oops": 3}, KEY)[0] == 400
        assert server.request("GET", "/" + "x" * 2000)[0] == 431
        document = json.loads(server.request("GET", "/openapi.json", headers=KEY)[2])
        assert document["components"]["schemas"]["CompletionRequest"]["properties"]["n"]["maximum"] == 2


@pytest.mark.slow
def test_full_queue_is_answered_429() -> None:
    with running(SLOW, scheduler={"max_num_seqs": 1, "max_queued_requests": 1}) as small:
        held = [open_post(small, {"prompt": "x", "max_tokens": 1900, "stream": True}) for _ in range(2)]
        small.await_metric("num_requests_waiting", 1)
        status, headers, data = small.request("POST", "/v1/completions", {"prompt": "x"})
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(data)["error"]["code"] == "rate_limit_exceeded"
        for connection in held:
            connection.close()
        small.await_metric("num_requests_running", 0)
        assert small.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
