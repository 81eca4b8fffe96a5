"""A client of servers with OpenAI's API: the model's name, and streamed replies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from jaxserve.errors import JaxserveError

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]

CONNECT_TIMEOUT_S = 10.0
DONE = "[DONE]"
"""The last event of a stream."""


class RemoteError(JaxserveError):
    """The server does not answer, rejects the request, or ends the stream early. Its text is one line for the user."""


class NoServerError(RemoteError):
    """No server answers at the URL."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """One part of a streamed reply."""

    arrived_s: float
    """Time of arrival, `time.perf_counter()`."""
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A server, and the fields that every request to it has."""

    url: str
    """Base URL without a slash at its end."""
    api_key: str | None = None
    options: Mapping[str, Any]
    """Fields of every request."""

    async def first_model(self) -> str:
        """Return the first model that the server lists. Raises RemoteError."""
        async with self._session() as session:
            return await first_model(session, self.url)

    async def stream(self, endpoint: Endpoint, fields: Mapping[str, Any]) -> AsyncIterator[OutputDelta]:
        """Yield the parts of one reply; closing the iterator ends the request. Raises RemoteError."""
        body = {**self.options, **fields, "stream": True}
        try:
            async with self._session() as session, session.post(self.url + endpoint, json=body) as response:
                if response.status != 200:
                    raise RemoteError(f"{response.status} {_error_text(await response.text())}")
                async for delta in deltas(response):
                    yield delta
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise _no_server(self.url, error) from error
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
            raise RemoteError("the reply broke off: the server closed the connection") from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise RemoteError(f"the reply broke off: {type(error).__name__}: {error}") from error

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),  # a long prompt takes long
        )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first model that the server lists. Raises RemoteError."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            text = await response.text()
            if response.status != 200:
                raise RemoteError(f"{url}/v1/models answered {response.status}: {_error_text(text)}")
            reply = json.loads(text)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise _no_server(url, error) from error
    try:
        return str(reply["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise RemoteError(f"{url}/v1/models lists no model; name one with --model") from None


async def deltas(response: aiohttp.ClientResponse) -> AsyncIterator[OutputDelta]:
    """Yield the parts of a server-sent stream. Raises RemoteError, and ValueError for an event that is not JSON."""
    is_finished = False
    async for line in response.content:
        arrived_s = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].decode("utf-8").strip()
        if data == DONE:
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise RemoteError(f"not a chunk of a reply: {data[:200]}")
        if chunk.get("error"):
            raise RemoteError(_error_text(data))
        for delta in _deltas_of(arrived_s, chunk):
            is_finished = is_finished or delta.finish_reason is not None
            yield delta
    if not is_finished:  # some servers do not send [DONE]
        raise RemoteError("the reply broke off: the server closed the connection")


def _deltas_of(arrived_s: float, chunk: dict[str, Any]) -> Sequence[OutputDelta]:
    choices = chunk.get("choices") or ()
    found = [_delta_of(arrived_s, choice) for choice in choices if isinstance(choice, dict)]
    if isinstance(usage := chunk.get("usage"), dict):
        found.append(OutputDelta(arrived_s, usage=usage))
    return found


def _delta_of(arrived_s: float, choice: dict[str, Any]) -> OutputDelta:
    delta = choice.get("delta") or {}
    return OutputDelta(
        arrived_s,
        text=choice.get("text") or delta.get("content") or "",
        reasoning=delta.get("reasoning") or delta.get("reasoning_content") or "",
        finish_reason=choice.get("finish_reason"),
    )


def _no_server(url: str, error: Exception) -> RemoteError:
    if isinstance(error, aiohttp.ClientSSLError):
        is_unknown = isinstance(error, aiohttp.ClientConnectorCertificateError)
        return RemoteError(f"{url}: {error}" + ("; SSL_CERT_FILE names further authorities" if is_unknown else ""))
    number = error.errno if isinstance(error, OSError) else None
    return NoServerError(f"no server at {url}: {os.strerror(number) if number and number > 0 else error}")


def _error_text(text: str) -> str:
    """Return the message of an error object, or else the beginning of `text`, in one line."""
    try:
        error = json.loads(text)["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError):
        message = text[:300]
    return " ".join(message.split())
