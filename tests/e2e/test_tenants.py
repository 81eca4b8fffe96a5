"""A server with keys: the operator's socket, keys that change while it runs, the log of requests, and secrets."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.e2e.http_server import running, until

pytestmark = pytest.mark.slow

BODY = {"prompt": [5, 6], "max_tokens": 4}


def on_socket(path: Path, request: str) -> bytes:
    """Send a request without a body to a Unix socket; return the first line of the reply."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(path))
        connection.sendall(f"{request} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        return connection.recv(65536).splitlines()[0]


def test_keys_change_while_the_server_runs_and_commands_are_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, operators = tmp_path / "keys.json", tmp_path / "operator.sock"
    file.write_text(json.dumps([{"key": "old", "name": "a"}]))
    monkeypatch.setenv("JAXSERVE_API_KEY", "sk-secret")
    server_section = {
        "api_key_file": str(file),
        "admin_socket": str(operators),
        "access_log": True,
        "api_processes": 2,
        "host": "0.0.0.0",
    }
    with running({"vocab_size": 384, "eos_token_ids": []}, server=server_section) as server:
        environment = Path(f"/proc/{server.engine_pid()}/environ").read_bytes()
        assert b"sk-secret" not in environment and b"PATH=" in environment
        assert "everybody who reaches" not in server.output, "it has a key"
        assert stat.S_IMODE(operators.stat().st_mode) == 0o600
        server.api_key = "old"
        assert server.request("POST", "/v1/completions", BODY, {"X-Request-Id": "my-id"})[0] == 200
        assert server.request("POST", "/reset_prefix_cache")[0] == 403
        server.await_metric("request_capacity", 32 + 1024)
        assert server.metric("engine_cpu_seconds_total") > 0
        assert server.metric("engine_memory_bytes") > 10 << 20
        assert server.metric("build_info") == 1, "the largest of two processes"
        assert server.metric("event_loop_lag_seconds_count") > 0
        with socket.create_connection(("127.0.0.1", server.port)):
            until(lambda: server.metric("http_connections") >= 1, "the connection was not counted")
        assert on_socket(operators, "POST /reset_prefix_cache").startswith(b"HTTP/1.1 200")
        usage = f"prompt_tokens={len(BODY['prompt'])} completion_tokens={BODY['max_tokens']}"
        until(lambda: f"id=my-id key=a {usage}" in server.output, "the request was not logged with its usage")
        assert "POST /v1/completions 200 " in server.output
        for text, line in (("[", "the API keys are not read again"), ('[{"key": "new", "name": "b"}]', "1 API keys")):
            file.write_text(text)
            os.kill(server.process.pid, signal.SIGHUP)
            until(lambda line=line: server.output.count(line) == 2, f"no line {line!r} of each process")
            expected = {200} if text == "[" else {401}
            assert {server.request("GET", "/v1/models")[0] for _ in range(8)} == expected
        server.api_key = "new"
        assert {server.request("POST", "/v1/completions", BODY)[0] for _ in range(8)} == {200}
        assert server.stop() == 0
        assert "sk-secret" not in server.output and "old" not in json.dumps(server.lines[-5:])


def test_a_server_for_everybody_says_so() -> None:
    with running(server={"host": "0.0.0.0"}) as server:
        assert "everybody who reaches 0.0.0.0 may use this server: it has no API key (--api-key-file)" in server.output
        assert server.request("POST", "/reset_prefix_cache")[0] == 403
        assert server.stop() == 0
