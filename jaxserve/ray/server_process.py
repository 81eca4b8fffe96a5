"""The `jaxserve serve` process of one replica, on a free loopback port.

`python -m jaxserve.ray.server_process FILE` is that process: it ends when its parent ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from jaxserve.cli.main import main
from jaxserve.errors import StartupError
from jaxserve.http.operations.schema import RoutingState
from jaxserve.parent import die_with_parent
from jaxserve.ray.access import OwnKey
from jaxserve.ray.wire import HOP_HEADERS, INGRESS_HEADERS, ReplyHead, ReplyPart, WireRequest
from jaxserve.runtime.environment import child_environment

_READY: Final = re.compile(rb"jaxserve is ready at (http://\S+) ")
_STATE: Final = msgspec.json.Decoder(RoutingState)
REPLICA_HEADER: Final = "X-Jaxserve-Replica"
STATUS_TIMEOUT_S: Final = 5.0
LIVE_TIMEOUT_S: Final = 12.0
"""Time that `/live` may take: a server on a busy node is slow, and replacing it would break its streams."""


class ServerProcess:
    """A running server and the HTTP client of its replica."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, http: aiohttp.ClientSession) -> None:
        self._process = process
        self._output = asyncio.create_task(_pass_on(process))
        self._url = url
        self._http = http

    @classmethod
    async def start(
        cls, command: Sequence[str], decided: Collection[str], cluster: str, timeout_s: float
    ) -> ServerProcess:
        """Start `command` on this node of the Ray cluster at `cluster`, and wait until it announces that it is ready.

        decided: names of the settings that the application decides. The process gets this node's environment without their
        variables, which would win over its file: images set JAXSERVE_HOST and JAXSERVE_PORT. Raises StartupError.
        """
        environment = {**child_environment(decided), "RAY_ADDRESS": cluster}
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
        try:
            async with asyncio.timeout(timeout_s):
                url = await _announced_url(process)
        except BaseException as error:
            if process.returncode is None:
                process.kill()
            if isinstance(error, TimeoutError):
                raise StartupError(f"the server was not ready within {timeout_s:g} s") from None
            raise
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        return cls(process, url, aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False))

    async def send(self, request: WireRequest, replica: str) -> AsyncGenerator[ReplyPart, None]:
        """Yield the head of the reply and the bytes of its body as they arrive. Ending early aborts the request."""
        try:
            reply = await self._http.request(
                request.method,
                self._url + request.target,
                headers=request.headers,
                data=request.body,
                allow_redirects=False,
            )
        except aiohttp.ClientConnectionError:
            yield ReplyHead.of_no_server(replica)
            return
        async with reply:
            headers = [
                (name, value)
                for name, value in reply.headers.items()
                if name.lower() not in HOP_HEADERS | INGRESS_HEADERS
            ]
            yield ReplyHead(reply.status, (*headers, (REPLICA_HEADER, replica)), replica)
            async for chunk in reply.content.iter_any():
                yield chunk

    async def wait(self) -> int:
        """Wait for the end of the server; returns its exit code."""
        return await self._process.wait()

    async def ailment(self) -> str | None:
        """Return why the server is not healthy, None if it is."""
        if self._process.returncode is not None:
            return f"the server ended with exit code {self._process.returncode}"
        try:
            async with asyncio.timeout(LIVE_TIMEOUT_S), self._http.get(f"{self._url}/live") as reply:
                return None if reply.status == 200 else (await reply.text())[:500]
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"/live: {error or type(error).__name__}"

    async def routing_state(self, key: OwnKey) -> RoutingState | None:
        """Return the server's load and cached pages; None if it does not tell."""
        try:
            async with (
                asyncio.timeout(STATUS_TIMEOUT_S),
                self._http.get(f"{self._url}/routing", headers=key.headers) as reply,
            ):
                key.note(reply.status)
                return _STATE.decode(await reply.read()) if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None

    async def stop(self, timeout_s: float) -> None:
        """Let the server drain for `timeout_s`, and end it."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._http.close()


@contextlib.contextmanager
def serve_command(settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the command of a server with these settings, which are in a file that only this user can read until the end of the block."""
    with tempfile.NamedTemporaryFile("w", prefix="jaxserve-replica-", suffix=".yaml", encoding="utf-8") as file:
        json.dump(dict(settings), file)  # JSON is YAML
        file.flush()
        yield [sys.executable, "-m", "jaxserve.ray.server_process", file.name]


async def _pass_on(process: asyncio.subprocess.Process) -> None:
    """Print what the server prints, such as the output of workers on other hosts: a full pipe would block it."""
    assert process.stdout is not None, "stdout is a pipe"
    while chunk := await process.stdout.read(1 << 16):
        sys.stdout.write(chunk.decode(errors="replace"))
        sys.stdout.flush()


async def _announced_url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None, "stdout is a pipe"
    while line := await process.stdout.readline():
        if match := _READY.search(line):
            return match[1].decode()
    raise StartupError(f"the server ended with exit code {await process.wait()} before it was ready")


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(["serve", "--config", sys.argv[1]]))
