"""The server of a replica on Ray: its settings, its keys, and the health that it reports of itself."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from jaxserve.config import ServerConfig
from jaxserve.http.api_keys import api_keys
from jaxserve.http.operations.schema import RoutingState
from jaxserve.ray.access import OwnKey
from jaxserve.ray.route_key import NO_PROMPT
from jaxserve.ray.server_process import ServerProcess, serve_command
from jaxserve.ray.settings import read_arguments
from jaxserve.ray.wire import ReplyHead, WireRequest
from jaxserve.runtime.environment import child_environment


class Fake:
    """A server whose answer to /live and whose key change, and a process in its place."""

    def __init__(self) -> None:
        self.status = 200
        self.key = "old"

    async def routing(self, http: web.Request) -> web.Response:
        is_known = http.headers["Authorization"] == f"Bearer {self.key}"
        return web.Response(status=200 if is_known else 401, body=msgspec.json.encode(RoutingState(7, 0, 1, 16, "")))

    async def live(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status, text="the engine was given up")


@pytest.fixture
async def started() -> AsyncIterator[tuple[Fake, TestServer, asyncio.subprocess.Process, ServerProcess]]:
    fake, app = Fake(), web.Application()
    app.router.add_get("/live", fake.live)
    app.router.add_get("/routing", fake.routing)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        yield fake, server, process, ServerProcess(process, str(server.make_url("")).rstrip("/"), http)
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_server_that_lives_is_healthy_and_one_that_does_not_says_why(started) -> None:  # type: ignore[no-untyped-def]
    fake, _, _, served = started
    assert await served.ailment() is None
    fake.status = 503
    assert await served.ailment() == "the engine was given up"


async def test_the_load_is_reported_again_after_a_change_of_the_keys(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The server may read its file later than it was written, so the old key is used as long as the server accepts it."""
    fake, _, _, served = started
    file = tmp_path / "keys.txt"
    file.write_text("old\n")
    key = OwnKey(ServerConfig(api_key_file=str(file)))
    file.write_text("new\n")
    assert (await served.routing_state(key)).queued_tokens == 7
    fake.key = "new"
    assert await served.routing_state(key) is None
    assert (await served.routing_state(key)).queued_tokens == 7


async def test_a_server_that_does_not_answer_is_not_healthy(started) -> None:  # type: ignore[no-untyped-def]
    _, server, _, served = started
    await server.close()
    found = await served.ailment()
    assert found is not None and found.startswith("/live: ")


async def test_a_server_that_is_gone_answers_no_request_and_the_relay_learns_which_it_was(started) -> None:  # type: ignore[no-untyped-def]
    _, server, _, served = started
    request = WireRequest("GET", "/live", (), b"", NO_PROMPT)
    assert [part async for part in served.send(request, "a")][1:] == [b"the engine was given up"]
    await server.close()
    assert [part async for part in served.send(request, "a")] == [ReplyHead.of_no_server("a")]


async def test_a_server_that_has_ended_is_not_healthy(started) -> None:  # type: ignore[no-untyped-def]
    _, _, process, served = started
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    assert await served.wait() == 1
    assert await served.ailment() == "the server ended with exit code 1"


async def test_a_server_has_the_settings_that_the_application_decides_and_the_keys_of_its_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Images set JAXSERVE_HOST and JAXSERVE_PORT, and variables win over files; keys are in no file and in no command."""
    for name, value in {"HOST": "0.0.0.0", "PORT": "8000", "MODEL": "another", "API_KEY": "sk-one,sk-two"}.items():
        monkeypatch.setenv(f"JAXSERVE_{name}", value)
    monkeypatch.setenv("JAXSERVE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = read_arguments({"model": "a/model"})
    program = """
import json, pathlib, sys, time
from jaxserve.runtime.environment import load_settings_here
values = load_settings_here({}, sys.argv[1]).values
pathlib.Path(sys.argv[2]).write_text(json.dumps(values))
print("jaxserve is ready at http://127.0.0.1:1 (x)", flush=True)
time.sleep(600)
"""
    with serve_command(settings.server) as serves:
        file = Path(serves[-1])
        assert "sk-one" not in await asyncio.to_thread(file.read_text)
        assert (await asyncio.to_thread(file.stat)).st_mode & 0o077 == 0
        command = [sys.executable, "-c", program, str(file), str(tmp_path / "seen")]
        served = await ServerProcess.start(command, settings.server, "127.0.0.1:6379", 600)
    assert not await asyncio.to_thread(file.exists), "no file is left when the server is ready"
    await served.stop(60)
    seen = json.loads((tmp_path / "seen").read_text())
    assert {name: seen[name] for name in settings.server} == settings.server
    assert (seen["host"], seen["port"], seen["model"]) == ("127.0.0.1", 0, "a/model")
    assert seen["compile_cache"] == str(tmp_path)
    assert api_keys(settings.config.server) == ["sk-one", "sk-two"] == seen["api_key"].split(",")


def test_keys_in_the_arguments_win_over_those_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_API_KEY", "of-the-node")
    settings = read_arguments({"model": "a/model", "api_key": "given"})
    assert api_keys(settings.config.server) == ["given"]
    assert "JAXSERVE_API_KEY" not in child_environment(settings.server)
    assert child_environment()["JAXSERVE_API_KEY"] == "of-the-node"
