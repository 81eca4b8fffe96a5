"""What every client of a server with OpenAI's API needs: the name of a model, and the events of a stream."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

import aiohttp

from jaxserve.errors import JaxserveError

DONE = "[DONE]"
"""The last event of a stream."""


class RemoteError(JaxserveError):
    """No server, one that refuses, or a stream that breaks off: one line for the user."""


class NoServerError(RemoteError):
    """Nobody answers there."""


def no_server(url: str, error: Exception) -> NoServerError:
    """Says why in as few words as the system does."""
    number = error.errno if isinstance(error, OSError) else None
    return NoServerError(f"no server at {url}: {os.strerror(number) if number and number > 0 else error}")


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists. Raises RemoteError."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            reply = await response.json(content_type=None)
            if response.status != 200:
                raise RemoteError(f"{url}/v1/models answered {response.status}: {str(reply)[:200]}")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise no_server(url, error) from error
    try:
        return str(reply["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise RemoteError(f"{url}/v1/models lists no model; name one with --model") from None


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, str]]:
    """Time (`time.perf_counter()` seconds) and payload of every `data:` line; other lines are skipped."""
    async for line in response.content:
        arrived_s = time.perf_counter()
        if line.startswith(b"data:"):
            yield arrived_s, line[5:].decode("utf-8").strip()
