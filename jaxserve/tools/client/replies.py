"""Asks for one streamed reply and passes on its pieces as they come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from jaxserve.tools.client.remote import DONE, RemoteError, events, first_model, no_server

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Piece:
    """News of a reply: usually some text."""

    arrived_s: float
    """`time.perf_counter()`."""
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A server and how it is asked."""

    url: str
    """Without a slash at its end."""
    api_key: str | None = None
    options: Mapping[str, Any]
    """Fields of every request."""

    async def first_model(self) -> str:
        """The first model that the server lists. Raises RemoteError."""
        async with self._session() as session:
            return await first_model(session, self.url)

    async def stream(self, endpoint: Endpoint, fields: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """The pieces of one reply. Whoever stops listening ends the request. Raises RemoteError."""
        body = {**self.options, **fields, "stream": True}
        try:
            async with self._session() as session, session.post(self.url + endpoint, json=body) as response:
                if response.status != 200:
                    raise RemoteError(f"{response.status} {_complaint(await response.text())}")
                async for piece in pieces(response):
                    yield piece
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise no_server(self.url, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise RemoteError(f"the reply broke off: {type(error).__name__}: {error}") from error

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),  # a long prompt takes long
        )


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[Piece]:
    """The pieces of a stream. Raises RemoteError, and ValueError for what is not JSON."""
    is_finished = False
    async for arrived_s, data in events(response):
        if data == DONE:
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise RemoteError(f"not a chunk of a reply: {data[:200]}")
        if chunk.get("error"):
            raise RemoteError(_complaint(data))
        for piece in _news(arrived_s, chunk):
            is_finished = is_finished or piece.finish_reason is not None
            yield piece
    if not is_finished:  # not every server says [DONE]
        raise RemoteError("the reply broke off: the server closed the connection")


def _news(arrived_s: float, chunk: dict[str, Any]) -> Sequence[Piece]:
    choices = chunk.get("choices") or ()
    news = [_piece(arrived_s, choice) for choice in choices if isinstance(choice, dict)]
    if isinstance(usage := chunk.get("usage"), dict):
        news.append(Piece(arrived_s, usage=usage))
    return news


def _piece(arrived_s: float, choice: dict[str, Any]) -> Piece:
    delta = choice.get("delta") or {}
    return Piece(
        arrived_s,
        text=choice.get("text") or delta.get("content") or "",
        reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
        finish_reason=choice.get("finish_reason"),
    )


def _complaint(text: str) -> str:
    """What an error object says, or the beginning of whatever came instead, in one line."""
    try:
        error = json.loads(text)["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError):
        message = text[:300]
    return " ".join(message.split())
