"""`--model NAME=MODEL` several times: an engine for each, on one port, with fake engines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import Server, await_ready, replacing, running, until
from tests.e2e.test_http_lifecycle import LONG, SLOW, is_alive
from tests.e2e.test_http_raw import open_post, read_until
from tests.e2e.test_replicas import engines_of
from tests.e2e.test_upgrade import sockets as sockets

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0}
STOPPED = b"The engine stopped while the request was running."


def text_of(server: Server, model: str) -> str:
    status, _, reply = server.request("POST", "/v1/completions", BODY | {"model": model})
    assert status == 200, reply
    found = json.loads(reply)
    assert found["model"] == model
    return str(found["choices"][0]["text"])


def health_of(server: Server) -> tuple[int, Any]:
    status, _, body = server.request("GET", "/health")
    return status, json.loads(body)


def test_an_engine_that_dies_leaves_the_other_models_stream_alone(tmp_path: Path) -> None:
    with running(SLOW, ["other"], server={"uds_dir": str(tmp_path), "engine_restarts": 2}) as server:
        assert health_of(server) == (200, {"status": "ok"})
        assert "other: cold start" in server.output
        text = text_of(server, "tiny")
        first, second = engines_of(server)
        kept, lost = (open_post(server, LONG | {"model": name}) for name in ("tiny", "other"))
        for stream in (kept, lost):
            read_until(stream, b'"text"')
        os.kill(second, signal.SIGKILL)
        assert read_until(lost, b"data: [DONE]\n\n").count(STOPPED) == 1
        lost.close()
        until(lambda: "other: the engine is back after" in server.output, "it never came back")
        assert text_of(server, "other") and is_alive(first) and engines_of(server)[0] == first
        os.kill(engines_of(server)[1], signal.SIGKILL)
        until(lambda: health_of(server)[0] == 503, "nobody missed it")
        assert health_of(server)[1]["model"] == "other"
        assert text_of(server, "tiny") == text, "served meanwhile"
        rest = read_until(kept, b"data: [DONE]\n\n")
        assert STOPPED not in rest and b'"finish_reason":"length"' in rest
        kept.close()
        until(lambda: server.output.count("other: the engine is back after") == 2, "it never came back")
        assert health_of(server)[0] == 200
        restarts = 'engine_restarts_total{engine="0",model_name='
        assert [server.metric(f'{restarts}"{name}"') for name in ("tiny", "other")] == [0, 2]
        os.kill(engines_of(server)[1], signal.SIGKILL)
        until(lambda: "other: not served any more; what is left: tiny" in server.output, "it was not given up")
        assert text_of(server, "tiny") == text
        assert server.request("GET", "/live")[0] == 200
        status, _, body = server.request("POST", "/v1/completions", BODY | {"model": "other"})
        assert (status, json.loads(body)["error"]["message"]) == (503, "The engine is not running.")
        assert health_of(server)[1] == {
            "status": "unhealthy",
            "reason": health_of(server)[1]["reason"],
            "model": "other",
        }
        assert server.stop() == 0
        assert list(tmp_path.iterdir()) == []
        assert "Traceback" not in server.output


def test_a_signal_drains_the_requests_of_all_models() -> None:
    with running(SLOW, ["other"]) as server:
        streams = [open_post(server, LONG | {"max_tokens": 200, "model": name}) for name in ("tiny", "other")]
        for stream in streams:
            read_until(stream, b'"text"')
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.request("GET", "/ready")[0] == 503, "never drained")
        for stream in streams:
            assert b'"finish_reason":"length"' in read_until(stream, b"data: [DONE]\n\n")
            stream.close()
        assert server.process.wait(30) == 0
        assert "stopping: 2 running requests" in server.output


def test_one_that_cannot_start_ends_the_start_with_one_line() -> None:
    with pytest.raises(AssertionError) as caught, running({"start_error": "too small"}, ["other"]):
        pass
    assert "jaxserve: error: tiny: " in str(caught.value)


def test_a_server_of_one_model_is_replaced_by_one_of_two_and_back(sockets: Path) -> None:
    with running(SLOW, server={"uds_dir": str(sockets)}) as server:
        stream = open_post(server, LONG | {"max_tokens": 300})
        read_until(stream, b'"text"')
        with replacing(server, sockets, SLOW, ["other"], after_drain=True) as successor:
            await_ready(successor)
            assert b'"finish_reason":"length"' in read_until(stream, b"data: [DONE]\n\n")
            stream.close()
            assert server.process.wait(30) == 0
            assert text_of(successor, "other") == text_of(successor, "tiny")
            stream = open_post(successor, LONG | {"max_tokens": 300, "model": "other"})
            read_until(stream, b'"text"')
            with replacing(successor, sockets, SLOW, after_drain=True) as last:
                await_ready(last)
                assert b'"finish_reason":"length"' in read_until(stream, b"data: [DONE]\n\n")
                stream.close()
                assert successor.process.wait(30) == 0
                assert last.request("POST", "/v1/completions", BODY | {"model": "other"})[0] == 404
                assert last.stop() == 0
