"""An engine that dies is started again: nothing of the old one reaches the new one, and the server stays."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import UnavailableError
from tests.e2e.http_server import Server, children_of, command_of, running, started, until
from tests.e2e.test_api_processes import connections_of, open_streams
from tests.e2e.test_http_lifecycle import LONG, SLOW, UNENDING, is_alive
from tests.e2e.test_http_raw import open_post, read_until
from tests.processes import freeze

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0}
STOPPED = b"The engine stopped while the request was running."


def kill_engine(server: Server) -> None:
    """Returns once the server knows."""
    seen = server.output.count("ended by signal 9")
    os.kill(server.engine_pid(), signal.SIGKILL)
    until(lambda: server.output.count("ended by signal 9") > seen, "nobody missed the engine")


def await_back(server: Server, times: int = 1) -> None:
    until(lambda: server.output.count("the engine is back after") == times, "the engine never came back", 60)


def further_process(server: Server) -> int:
    return next(pid for pid in children_of(server.process.pid) if b"api_worker" in command_of(pid))


def text_of(server: Server, body: dict[str, Any] = BODY) -> str:
    status, _, reply = server.request("POST", "/v1/completions", body)
    assert status == 200, reply
    return str(json.loads(reply)["choices"][0]["text"])


def spoil(sockets: Path, is_spoilt: bool = True) -> None:
    """Let engines refuse to start: the folder of their sockets is not theirs alone."""
    (folder,) = sockets.iterdir()
    folder.chmod(0o755 if is_spoilt else 0o700)


@pytest.mark.versions
def test_streams_end_with_one_error_and_the_server_goes_on_with_the_next_engine(tmp_path: Path) -> None:
    with running(SLOW, server={"uds_dir": str(tmp_path), "engine_restarts": 10**6}) as server:
        text, pid = text_of(server), server.engine_pid()
        counted = [server.metric(f"{name}_total") for name in ("http_requests", "compilations")]
        streamed, plain = open_post(server, LONG), open_post(server, LONG | {"stream": False})
        read_until(streamed, b'"text"')
        server.await_metric(
            "time_to_first_token_seconds_count", 3
        )  # one without a token would wait for the next engine
        spoil(tmp_path)
        kill_engine(server)
        rest = read_until(streamed, b"data: [DONE]\n\n")
        assert rest.count(b'data: {"error":') == rest.count(STOPPED) == 1
        assert b" 503 " in read_until(plain, b"\r\n\r\n").splitlines()[0]
        streamed.close()
        plain.close()
        until(lambda: server.metric("engine_restarts_total") >= 3, "a start that failed was not tried again", 60)
        assert server.request("GET", "/live")[0] == 200
        for path in ("/health", "/ready"):
            status, _, data = server.request("GET", path)
            assert (status, json.loads(data)["status"]) == (503, "restarting")
        status, headers, data = server.request("POST", "/v1/completions", BODY)
        assert (status, headers["retry-after"]) == (503, str(UnavailableError.retry_after_s))
        assert json.loads(data)["error"]["message"] == "The model is loading."
        assert json.loads(server.request("GET", "/v1/models")[2])["data"][0]["id"] == "tiny"
        assert server.metric("num_requests_running") == 0
        spoil(tmp_path, is_spoilt=False)
        await_back(server)
        assert server.request("GET", "/ready")[0] == 200
        assert text_of(server) == text
        assert server.engine_pid() != pid and not is_alive(pid)
        for name, before in zip(("http_requests", "compilations"), counted, strict=True):
            assert server.metric(f"{name}_total") >= before
        assert server.stop() == 0
        assert list(tmp_path.iterdir()) == []
        assert "Traceback" not in server.output


def test_an_idle_engine_comes_back_each_time_and_its_start_is_what_is_reported(tmp_path: Path) -> None:
    with running({"vocab_size": 384, "eos_token_ids": []}, server={"uds_dir": str(tmp_path)}) as server:
        text = text_of(server)
        server.await_metric("generation_tokens_total", 4)
        (folder,) = tmp_path.iterdir()
        inode = folder.stat().st_ino
        for times, number in ((1, signal.SIGKILL), (2, signal.SIGTERM)):
            os.kill(server.engine_pid(), number)
            await_back(server, times)
            assert folder.stat().st_ino == inode, "the folder that the server has locked"
            assert text_of(server) == text
            server.await_metric("generation_tokens_total", 4 * (times + 1))
            server.await_metric("engine_restarts_total", times)
        report = json.loads(server.request("GET", "/startup")[2])
        assert [phase["phase"] for phase in report["phases"]] == ["engine"]
        label = 'startup_phase_seconds{engine="0",model_name="tiny",phase='
        assert server.metric(label + '"total"') == pytest.approx(report["total_seconds"], abs=0.002)
        assert f'{label}"server"' not in server.request("GET", "/metrics")[2].decode()
        for line in (
            "the engine process was ended by signal 9; starting it again (1 of 3 restarts within 10 minutes)",
            "the engine process ended with exit code 0; starting it again (2 of 3 restarts within 10 minutes)",
        ):
            assert line in server.output
        assert server.output.count("is ready at") == 1
        assert server.stop() == 0
        assert "Traceback" not in server.output


def test_engine_that_dies_too_often_is_given_up() -> None:
    with running(SLOW, server={"engine_restarts": 1}) as server:
        kill_engine(server)
        await_back(server)
        stream = open_post(server, LONG)
        read_until(stream, b'"text"')
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert STOPPED in read_until(stream, b"data: [DONE]\n\n")
        stream.close()
        assert server.request("GET", "/live")[0] == server.request("GET", "/health")[0] == 503
        assert server.request("POST", "/v1/completions", BODY)[0] == 503
        assert server.process.wait(30) == 1
        assert "not started again: 1 of 1 restarts" in server.output
        assert "Traceback" not in server.output


def test_engine_that_cannot_start_again_is_given_up(tmp_path: Path) -> None:
    with running(server={"uds_dir": str(tmp_path)}) as server:
        spoil(tmp_path)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(60) == 1
        server.reader.join(10)
        assert server.output.count("starting it again") == 3
        assert server.output.count("ended with exit code 2 before it was ready") == 3, "the last one ended the server"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.versions
@pytest.mark.parametrize("api_processes", [1, 2])
def test_sigterm_while_there_is_no_engine_ends_cleanly(tmp_path: Path, api_processes: int) -> None:
    sections = {"uds_dir": str(tmp_path), "engine_restarts": 10**6, "api_processes": api_processes}
    with running(SLOW, server=sections) as server:
        stream = open_post(server, LONG)
        read_until(stream, b'"text"')
        spoil(tmp_path)
        kill_engine(server)
        assert STOPPED in read_until(stream, b"data: [DONE]\n\n")
        stream.close()
        pids = children_of(server.process.pid)
        assert server.stop() == 0
        assert not any(map(is_alive, pids))
        assert list(tmp_path.iterdir()) == []
        assert "Traceback" not in server.output


def test_further_process_that_dies_while_there_is_no_engine_is_started_again(tmp_path: Path) -> None:
    sections = {"uds_dir": str(tmp_path), "engine_restarts": 10**6, "api_processes": 2}
    with running(SLOW, server=sections) as server:
        further = further_process(server)
        spoil(tmp_path)
        kill_engine(server)
        os.kill(further, signal.SIGKILL)
        until(lambda: "API process 1 was ended by signal 9; starting it again" in server.output, "it was not missed")
        spoil(tmp_path, is_spoilt=False)
        await_back(server)
        until(lambda: {server.request("POST", "/v1/completions", BODY)[0] for _ in range(12)} == {200}, "never ready")
        assert server.stop() == 0


def test_engine_that_dies_while_the_server_drains_is_not_started_again() -> None:
    with running(SLOW) as server:
        stream = open_post(server, LONG)
        read_until(stream, b'"text"')
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.request("GET", "/ready")[0] == 503, "never drained")
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert STOPPED in read_until(stream, b"data: [DONE]\n\n")
        stream.close()
        assert server.process.wait(30) == 0
        assert "starting it again" not in server.output


def test_response_in_the_background_fails_and_is_kept() -> None:
    with running(SLOW) as server:
        body = {"input": "x", "background": True, "max_output_tokens": 1900}
        status, _, data = server.request("POST", "/v1/responses", body)
        assert status == 200, data
        name = json.loads(data)["id"]
        server.await_metric("num_requests_running", 1)
        kill_engine(server)
        await_back(server)
        kept = json.loads(server.request("GET", f"/v1/responses/{name}")[2])
        assert (kept["status"], kept["error"]["message"]) == ("failed", STOPPED.decode())
        assert server.stop() == 0


@pytest.mark.versions
def test_every_process_turns_to_the_next_engine_and_brings_no_work_along() -> None:
    """One of them hears of it late: what its clients asked for meanwhile is meant for an engine that is gone."""
    with running(UNENDING, server={"api_processes": 2}) as server:
        further = further_process(server)
        streams = open_streams(server, 12)
        server.await_metric("num_requests_running", 12)
        held = [connections_of(pid, server.port) for pid in (server.process.pid, further)]
        assert min(held) > 0 and sum(held) == 12
        freeze(further)
        os.kill(server.engine_pid(), signal.SIGKILL)
        await_back(server)
        late = [open_post(server, LONG) for _ in range(12)]  # the frozen process gets some
        os.kill(further, signal.SIGCONT)
        for stream in streams:
            assert read_until(stream, b"data: [DONE]\n\n").count(b'"error"') == 1
        for stream in late:
            read_until(stream, b"{")  # rejected, or begun: by now no request waits for an answer
        for stream in streams + late:
            stream.close()
        server.await_metric("num_requests_running", 0)
        until(lambda: {server.request("GET", "/ready")[0] for _ in range(8)} == {200}, "one of them is not ready")
        before = server.metric("prompt_tokens_total")
        texts = {text_of(server) for _ in range(16)}
        assert len(texts) == 1
        server.await_metric("prompt_tokens_total", before + 16 * 2)
        server.await_metric("num_requests_running", 0)
        assert server.metric("engine_restarts_total") == 1
        assert server.stop() == 0
        assert "Traceback" not in server.output


@pytest.mark.versions
def test_an_engine_that_hangs_is_killed_and_started_again() -> None:
    with running(SLOW, server={"stall_timeout": 2}) as server:
        text, pid = text_of(server), server.engine_pid()
        stream = open_post(server, LONG)
        read_until(stream, b'"text"')
        freeze(pid)
        rest = read_until(stream, b"data: [DONE]\n\n")
        assert rest.count(STOPPED) == 1
        stream.close()
        await_back(server)
        assert "the engine has been silent for more than 4 s; starting it again" in server.output
        assert not is_alive(pid)
        assert text_of(server) == text
        assert server.stop() == 0


def test_a_start_that_hangs_ends_with_one_line() -> None:
    with started({"hangs_at_start": True}, server={"startup_timeout": 0.5}) as server:
        assert server.process.wait(60) == 2
        server.reader.join(10)
        last = server.lines[-1]
        assert last.startswith("jaxserve: error: the start of the engine made no progress for 0.5 s"), server.output
        assert last.endswith("(--startup-timeout)")
        assert "Traceback" not in server.output


def test_a_request_that_nothing_was_streamed_of_is_answered_by_the_next_engine() -> None:
    with running(SLOW, server={"engine_restarts": 3}) as server:
        text, pid = text_of(server), server.engine_pid()
        freeze(pid)
        waits = open_post(server, BODY | {"stream": False})
        until(lambda: json.loads(server.request("GET", "/routing")[2])["num_sequences"] == 1, "it was never submitted")
        os.kill(pid, signal.SIGKILL)
        reply = read_until(waits, b"total_tokens")
        head, _, body = reply.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0] and json.dumps(text, ensure_ascii=False).encode() in body
        waits.close()
        assert server.metric("request_retries_total") == 1
        assert server.stop() == 0
