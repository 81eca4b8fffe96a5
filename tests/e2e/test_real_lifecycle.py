"""A real model from its start to its end: program cache, drain, several devices."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import SOURCES, START_TIMEOUT_S, Server, await_ready, launched, until
from tests.e2e.real_server import BATCH_PROGRAMS, COLD_START_TIMEOUT_S, FEW_PROGRAMS, model, serving_tiny
from tests.e2e.test_http_lifecycle import is_alive
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = [pytest.mark.slow, pytest.mark.versions]

WARMUP = 'compilations_total{engine="0",model_name="tiny",phase="warmup"'
MAX_START_LINES = 12
NUM_PROGRAMS = 6
"""Programs of a server for one request at a time: decode[1], mixed[16] and the four state programs."""


def greedy(server: Server, **options: Any) -> Any:
    prompt = [int(token) for token in model().prompt_ids]
    body = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True} | options
    status, _, reply = server.request("POST", "/v1/completions", body)
    assert status == 200, reply
    return json.loads(reply)["choices"][0]


def warmup_compilations(server: Server) -> float:
    """After a request: then the engine's numbers have arrived."""
    greedy(server, max_tokens=1)
    return server.metric(WARMUP)


def test_second_start_compiles_no_program(tmp_path: Path) -> None:
    """Placing weights and pages takes a few small programs of JAX's own in any start.

    The second start has a copy of the programs, and another context, of which programs for CPUs know nothing.
    """
    cache, copy = tmp_path / "programs", tmp_path / "copy"
    with serving_tiny(*FEW_PROGRAMS, programs=cache) as cold:
        cold_text, cold_compilations = greedy(cold)["text"], warmup_compilations(cold)
    subprocess.run(["cp", "-a", str(cache), str(copy)], check=True)
    files = {file: file.stat().st_ino for file in copy.iterdir()}
    assert len(files) == NUM_PROGRAMS
    with serving_tiny(*FEW_PROGRAMS, "--max-model-len", "128", programs=copy) as warm:
        shown = [line for line in warm.lines if " left" not in line]  # those in the middle of a phase that takes long
        assert shown[-1].startswith("jaxserve is ready at ") and len(shown) <= MAX_START_LINES, warm.output
        assert greedy(warm)["text"] == cold_text
        assert warmup_compilations(warm) == cold_compilations - NUM_PROGRAMS
    assert {file: file.stat().st_ino for file in copy.iterdir()} == files, "an entry was written again"


def test_a_server_starts_warm_with_the_command_that_jaxserve_compile_prints(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "jaxserve.cli.main"]
    words = [
        "compile",
        str(model().path),
        "--output",
        str(tmp_path / "programs"),
        *FEW_PROGRAMS,
        "--cpu-kernels",
        "xla",
    ]
    environment = os.environ | {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*program, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, shown = done.stdout.splitlines()
    assert len(table) == 1 + NUM_PROGRAMS
    before, serve, *flags = shlex.split(shown.removeprefix("serve with: "))
    assert (before, serve) == ("jaxserve", "serve")
    with launched([*program, serve, *flags, "--port", "0", "--uds-dir", str(tmp_path)]) as server:
        await_ready(server, COLD_START_TIMEOUT_S)
        report = json.loads(server.request("GET", "/startup")[2])
        assert (report["start"], {one["source"] for one in report["programs"]}) == ("warm", {"cache"})
        assert "had to be compiled" not in server.output
        assert server.stop() == 0


def test_killed_engine_is_back_with_the_same_text_and_compiles_no_program(programs: Path) -> None:
    with serving_tiny(*FEW_PROGRAMS, programs=programs) as server:
        text = greedy(server)["text"]
        os.kill(server.engine_pid(), signal.SIGKILL)
        until(lambda: "the engine is back after" in server.output, "never came back", START_TIMEOUT_S)
        assert greedy(server)["text"] == text
        report = json.loads(server.request("GET", "/startup")[2])
        assert (report["status"], report["start"]) == ("started", "warm")
        assert {"engine", "load", "compile"} < {phase["phase"] for phase in report["phases"]}
        assert server.stop() == 0


def test_sigterm_lets_a_real_request_finish(programs: Path) -> None:
    with serving_tiny(*BATCH_PROGRAMS, programs=programs) as server:
        expected = greedy(server, max_tokens=470)["text"]
        pid = server.engine_pid()
        tokens = [int(token) for token in model().prompt_ids]
        body = {"prompt": tokens, "max_tokens": 470, "temperature": 0, "ignore_eos": True, "stream": True}
        with open_post(server, body) as connection:
            data = read_until(connection, b'"text"')
            server.process.send_signal(signal.SIGTERM)
            data += read_until(connection, b"data: [DONE]\n\n")
        texts = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b'data: {"id"')]
        assert "".join(event["choices"][0]["text"] for event in texts) == expected
        assert server.process.wait(30) == 0
        until(lambda: not is_alive(pid), "the engine outlived its parent")
        assert "Traceback" not in server.output


def test_two_devices_give_the_same_text(real_server: Server, programs: Path) -> None:
    with serving_tiny(*FEW_PROGRAMS, "--tensor-parallel-size", "2", programs=programs) as server:
        assert greedy(server, logprobs=0)["logprobs"]["tokens"] == greedy(real_server, logprobs=0)["logprobs"]["tokens"]
        assert server.metric('compilations_total{engine="0",model_name="tiny",phase="serving"') == 0
        assert server.stop() == 0
