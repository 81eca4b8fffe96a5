"""Large replies that are sent in parts, as fast as the client reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from jaxserve.http.connection import connection_of

PART_BYTES: Final = 256 << 10
"""Bytes that are copied to the transport at once."""


async def json_response(http: web.Request, body: bytes, headers: Mapping[str, str] | None = None) -> web.StreamResponse:
    """Return the response with this JSON. Large ones are sent here, in parts.

    Raises ConnectionResetError if the client takes nothing for `--write-timeout`.
    """
    if len(body) <= PART_BYTES or http.method == "HEAD":
        return web.Response(body=body, content_type="application/json", headers=headers)
    connection = connection_of(http)
    response = web.StreamResponse(headers={"Content-Type": "application/json", **(headers or {})})
    response.content_length = len(body)
    await response.prepare(http)
    rest = memoryview(body)
    for start in range(0, len(body), PART_BYTES):
        async with connection.patience():
            await response.write(rest[start : start + PART_BYTES])
            await connection.wait_writable()
    async with connection.patience():
        await response.write_eof()
    return response
