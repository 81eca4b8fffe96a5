"""The health of a replica on Ray is what its server says of itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from jaxserve.ray.server_process import ServerProcess


class Fake:
    """A server whose answer to /live changes, and a process in its place."""

    def __init__(self) -> None:
        self.status = 200

    async def live(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status, text="the engine was given up")


@pytest.fixture
async def started() -> AsyncIterator[tuple[Fake, TestServer, asyncio.subprocess.Process, ServerProcess]]:
    fake, app = Fake(), web.Application()
    app.router.add_get("/live", fake.live)
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


async def test_a_server_that_does_not_answer_is_not_healthy(started) -> None:  # type: ignore[no-untyped-def]
    _, server, _, served = started
    await server.close()
    found = await served.ailment()
    assert found is not None and found.startswith("/live: ")


async def test_a_server_that_has_ended_is_not_healthy(started) -> None:  # type: ignore[no-untyped-def]
    _, _, process, served = started
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()
    assert await served.ailment() == "the server ended with exit code 1"
