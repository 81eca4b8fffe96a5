"""Sends one streamed request and records when its text arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from jaxserve.tools.bench.prompts import Prompt
from jaxserve.tools.bench.target import Target
from jaxserve.tools.client import RemoteError, deltas

MAX_STALE_CONNECTIONS = 3

ErrorKind = Literal["http", "connection", "timeout", "stream", "engine"]
"""Rejected with a status, not answered, timed out, broken off in the stream; or, offline, an error of the engine."""


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times are `time.perf_counter()` seconds."""

    started_s: float
    num_sent_tokens: int = 0
    """Prompt tokens, counted by the benchmark."""
    num_wanted_tokens: int = 0
    """Requested output tokens."""
    finished_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    """Time of each chunk with text."""
    text: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    has_usage: bool = False
    """True if the token counts are the server's."""
    error: str | None = None
    error_kind: ErrorKind | None = None

    def fail(self, kind: ErrorKind, message: str) -> None:
        self.error_kind, self.error = kind, message


async def send(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> RequestRecord:
    """Stream one request to its end. A failure is recorded, not raised."""
    body = target.body(prompt)
    record = RequestRecord(
        started_s=time.perf_counter(),
        num_sent_tokens=len(prompt.token_ids),
        num_wanted_tokens=prompt.num_output_tokens,
        num_prompt_tokens=len(prompt.token_ids),
    )
    try:
        async with await _post(session, target.url + target.endpoint, body) as response:
            if response.status != 200:
                record.fail("http", f"HTTP {response.status}: {(await response.text())[:200]}")
            else:
                await _read_stream(response, record)
    except TimeoutError as error:
        record.fail("timeout", f"{type(error).__name__}: {error}")
    except (aiohttp.ClientError, OSError) as error:
        kind: ErrorKind = "stream" if record.chunk_times_s else "connection"
        record.fail(kind, f"{type(error).__name__}: {error}")
    except RemoteError as error:
        record.fail("stream", f"in the stream: {str(error)[:200]}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        record.fail("stream", f"not a chunk of a completion: {type(error).__name__}: {error}")
    record.finished_s = time.perf_counter()
    return record


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
    """Send the request, again if a kept connection was closed: some servers (cpp-httplib) do so without notice."""
    is_kept = session.connector is not None and not session.connector.force_close
    for _ in range(MAX_STALE_CONNECTIONS if is_kept else 0):
        try:
            return await session.post(url, json=body)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            continue
    return await session.post(url, json=body)


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    async for delta in deltas(response):
        if text := delta.reasoning + delta.text:
            record.chunk_times_s.append(delta.arrived_s)
            record.text.append(text)
        if delta.usage:
            _note_usage(record, delta.usage)
    if not record.chunk_times_s and not record.num_output_tokens:
        record.fail("stream", "the stream ended without text")


def _note_usage(record: RequestRecord, usage: Mapping[str, Any]) -> None:
    record.has_usage = True
    record.num_prompt_tokens = usage["prompt_tokens"]
    record.num_output_tokens = usage["completion_tokens"]
    record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
