"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One page of the browser."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        """Errors that the page's console showed."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=240)
            if message.get("method") == "Log.entryAdded":
                self.complaints.append(str(message["params"]["entry"]["text"]))
            elif message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"]["exceptionDetails"])[:1000])
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it is."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        poll = f"(async () => {{ while (!({condition})) await new Promise(requestAnimationFrame); }})()"
        await asyncio.wait_for(self.run(poll), 240)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def screenshot(self) -> bytes:
        """Return the visible part as a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@contextlib.asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """Yield the tab of a new browser."""
    assert BROWSER is not None, "the caller skips without a browser"
    with tempfile.TemporaryDirectory(prefix="jaxserve-browser-", ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        options += [f"--user-data-dir={folder}", "--window-size=1280,860"]
        process = await asyncio.create_subprocess_exec(
            BROWSER, *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            port = None
            async with asyncio.timeout(240):
                while port is None:  # it says: DevTools listening on ws://127.0.0.1:PORT/...
                    port = re.search(rb"ws://127\.0\.0\.1:(\d+)/", await process.stderr.readline())
            async with ClientSession(f"http://127.0.0.1:{int(port[1])}/") as http:
                async with http.get("/json") as response:
                    pages = [one for one in await response.json() if one["type"] == "page"]
                async with http.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    opened = Tab(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await opened.call(f"{domain}.enable")
                    yield opened
        finally:
            process.terminate()
            await process.wait()
