"""Start, drain and death of the process tree."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxserve.ipc.address import own_address
from jaxserve.tools.bench.startup import free_port, http_get
from tests.e2e.http_server import PYTHON, ROOT, SOURCES, START_TIMEOUT_S, TOKENIZER, running, started, until
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = [pytest.mark.slow, pytest.mark.versions]

SLOW: dict[str, Any] = {"device_seconds": 0.01, "vocab_size": 384, "eos_token_ids": []}
LONG = {"prompt": "x", "max_tokens": 1900, "stream": True}
UNENDING: dict[str, Any] = SLOW | {"max_model_len": 1 << 20, "num_blocks": 1 << 16}
ENDLESS = LONG | {"max_tokens": 1_000_000}
"""Takes hours at an engine that is UNENDING: however slow the machine, it ends only when it is ended."""


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while received := connection.recv(65536):
        data += received
    return data


def start_error(fake: dict[str, Any] | None = None, **sections: dict[str, Any]) -> str:
    """The one line of a server that cannot start and ends with exit code 2."""
    with started(fake, **sections) as server:
        assert server.process.wait(START_TIMEOUT_S) == 2
        server.reader.join(10)
        errors = [line for line in server.lines if line.startswith("jaxserve: error: ")]
        assert len(errors) == 1, server.output
        assert "Traceback" not in server.output
        return errors[0]


def test_ready_line_has_url_and_a_command_that_works() -> None:
    with running() as server:
        line = next(line for line in server.lines if "is ready" in line)
        words = line.partition("curl ")[2]
        url, _, data = words.partition(" -H 'Content-Type: application/json' -d ")
        status, _, reply = server.request("POST", url.removeprefix(server.url), json.loads(data.strip("'")))
        assert status == 200
        assert json.loads(reply)["object"] == "chat.completion"
        pid = server.engine_pid()
        assert server.stop() == 0
        assert not is_alive(pid)


def test_every_line_is_an_object_where_logs_are_json() -> None:
    with running(server={"log_format": "json"}) as server:
        assert server.request("POST", "/v1/completions", {"model": "tiny", "prompt": "x"})[0] == 200
        assert server.stop() == 0
        server.reader.join(10)
    records = [json.loads(line) for line in server.lines]
    assert {"time", "level", "logger", "process", "message"} == set().union(*records)
    assert any(record["message"].startswith("jaxserve is ready at http") for record in records)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_output_that_no_process_reads_is_no_reason_to_stop(tmp_path: Path, num_processes: int) -> None:
    """Nor one for another exit status than 0: Python tries to write at its end what is left in a buffer."""
    port = free_port()
    server = {"port": port, "uds_dir": str(tmp_path), "api_processes": num_processes}
    config = {"model": {"model": str(TOKENIZER)}, "server": server}
    command = [PYTHON, "-m", "tests.e2e.fake_engine_server", json.dumps([config]), "{}"]
    environment = os.environ | {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONUNBUFFERED", None)
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(command, stdout=writer, stderr=writer, env=environment, cwd=ROOT) as process:
        os.close(writer)
        try:
            until(lambda: process.poll() is not None or http_get(port, "/ready")[0] == 200, "not ready")
            process.terminate()
            assert process.wait(START_TIMEOUT_S) == 0
        finally:
            process.kill()


def test_sigterm_lets_requests_finish_and_refuses_new_ones() -> None:
    with running(SLOW) as server:
        pid = server.engine_pid()
        connection = open_post(server, {"prompt": "x", "max_tokens": 150, "stream": True})
        read_until(connection, b'"text"')
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.request("GET", "/ready")[0] == 503, "never drained")
        assert json.loads(server.request("GET", "/ready")[2]) == {"status": "draining"}
        status, headers, data = server.request("POST", "/v1/completions", {"prompt": "x"})
        assert (status, json.loads(data)["error"]["code"]) == (503, "service_unavailable")
        assert headers["retry-after"]
        rest = read_until(connection, b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
        connection.close()
        assert server.process.wait(30) == 0
        assert not is_alive(pid)


def test_drain_that_takes_too_long_ends_with_an_error_event() -> None:
    with running(SLOW, server={"shutdown_timeout": 0.2}) as server:
        connection = open_post(server, LONG)
        read_until(connection, b'"text"')
        server.process.send_signal(signal.SIGTERM)
        rest = read_all(connection)
        assert b'data: {"error":{"message":"The server is shutting down."' in rest
        assert b"data: [DONE]\n\n" in rest
        connection.close()
        assert server.process.wait(30) == 0


def test_second_signal_ends_at_once() -> None:
    with running(SLOW) as server:
        connection = open_post(server, LONG)
        read_until(connection, b'"text"')
        server.process.send_signal(signal.SIGINT)
        until(lambda: server.request("GET", "/ready")[0] == 503, "never drained")
        server.process.send_signal(signal.SIGINT)
        assert b"shutting down" in read_all(connection)
        connection.close()
        assert server.process.wait(30) == 0


def test_killed_engine_that_may_not_be_started_again_ends_streams_cleanly_and_turns_health_red() -> None:
    with running(SLOW, server={"engine_restarts": 0}) as server:
        streamed = open_post(server, LONG)
        plain = open_post(server, LONG | {"stream": False})
        read_until(streamed, b'"text"')
        server.await_metric("num_requests_running", 2)
        os.kill(server.engine_pid(), signal.SIGKILL)
        rest = read_until(streamed, b"data: [DONE]\n\n")
        assert b'data: {"error":{"message":"The engine stopped while the request was running."' in rest
        assert b" 503 " in read_until(plain, b"\r\n\r\n").splitlines()[0]
        assert server.request("GET", "/health")[0] == 503
        assert server.request("GET", "/ready")[0] == 503
        assert server.request("POST", "/v1/completions", {"prompt": "x"})[0] == 503
        streamed.close()
        plain.close()
        assert server.process.wait(30) == 1
        assert "ended by signal 9" in server.output
        assert "Traceback" not in server.output


def test_nothing_is_left_of_the_sockets(tmp_path: Path) -> None:
    with running(server={"uds_dir": str(tmp_path)}) as server:
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert server.stop() == 0
        assert list(tmp_path.iterdir()) == []


def test_engine_dies_with_its_killed_parent_and_nothing_of_their_socket_outlives_the_next_start(tmp_path: Path) -> None:
    with running(server={"uds_dir": str(tmp_path)}) as server:
        pid = server.engine_pid()
        server.process.kill()
        until(lambda: not is_alive(pid), "the engine outlived its parent")
    left = list(tmp_path.iterdir())  # nothing, where the engine had the time to remove it
    with own_address(str(tmp_path)):
        assert not any(folder.exists() for folder in left)


def test_failing_step_fails_its_requests_not_the_server() -> None:
    with running(SLOW | {"fail_at_steps": [3]}) as server:
        status, _, data = server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 100})
        assert (status, json.loads(data)["error"]["code"]) == (500, "internal_error")
        assert server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        assert server.request("GET", "/health")[0] == 200


def test_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = start_error(server={"port": port})
    assert f"port {port}" in line


def test_missing_model_is_one_line(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in start_error(model={"model": str(tmp_path / "nothing")})


def test_engine_that_cannot_start_is_one_line() -> None:
    line = start_error({"start_error": "model.safetensors: truncated"})
    assert line == "jaxserve: error: model.safetensors: truncated"


def test_tokenizer_of_another_model_is_one_line() -> None:
    assert "383" in start_error({"vocab_size": 300})


def test_sigterm_while_loading_ends_cleanly(tmp_path: Path) -> None:
    """The template is a pipe without a writer, so loading hangs."""
    pipe = tmp_path / "template.jinja"
    os.mkfifo(pipe)
    with started(model={"model": str(TOKENIZER), "chat_template": str(pipe)}) as server:
        until(lambda: "load tokenizer: 0/1" in server.output, "never began to load")
        assert server.stop() == 0
        assert "Traceback" not in server.output


def test_http_answers_while_loading(tmp_path: Path) -> None:
    pipe = tmp_path / "template.jinja"
    os.mkfifo(pipe)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with started(
        model={"model": str(TOKENIZER), "served_model_name": "tiny", "chat_template": str(pipe)}, server={"port": port}
    ) as server:
        server.port = port
        until(lambda: "load tokenizer: 0/1" in server.output, "never began to load")
        status, _, data = server.request("GET", "/ready")
        waiting_for = {"phase": "tokenizer", "done": 0, "total": 1, "eta_seconds": None}
        assert (status, json.loads(data)) == (503, {"status": "loading", **waiting_for})
        assert server.request("GET", "/health")[::2] == (503, data)
        assert server.request("GET", "/live")[0] == 200
        assert server.request("GET", "/metrics")[0] == 200
        assert server.request("GET", "/v1/models")[0] == 200
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            assert server.request("POST", path, body)[0] == 503
        pipe.write_text("{{ messages[0].content }}")
        until(lambda: server.request("GET", "/ready")[0] == 200, "never ready")
        assert server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        assert server.metric('startup_phase_seconds{engine="0",model_name="tiny",phase="tokenizer"}') > 0
        report = json.loads(server.request("GET", "/startup")[2])
        phases = {phase["phase"]: phase for phase in report["phases"]}
        assert set(phases) == {"server", "model", "engine", "tokenizer"}
        assert phases["tokenizer"]["start_seconds"] < phases["engine"]["end_seconds"], "they overlap"
        ends = [phase["end_seconds"] for phase in phases.values()]
        assert report["total_seconds"] == pytest.approx(max(ends), abs=0.002)
        assert "start in" in server.output and "(its phases: /startup)" in server.output


def test_port_is_free_again_at_once() -> None:
    with running() as server:
        server.request("GET", "/health")
        assert server.stop() == 0
        with running(server={"port": server.port}) as again:
            assert again.request("GET", "/health")[0] == 200
