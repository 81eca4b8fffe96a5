"""A proxy that serves a server below a path, as a reverse proxy for several programs does."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import ClientSession, web

_OWN_HEADERS = {"host", "content-length", "transfer-encoding", "connection"}


@contextlib.asynccontextmanager
async def below(prefix: str, url: str) -> AsyncIterator[str]:
    """Yield an address that ends with `prefix` and passes everything below it to `url`."""
    async with ClientSession(auto_decompress=False) as client:

        async def forward(request: web.Request) -> web.StreamResponse:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS}
            target, body = f"{url}/{request.match_info['path']}", await request.read()
            async with client.request(request.method, target, headers=headers, data=body or None) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                return response

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", prefix + "{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            await runner.cleanup()
