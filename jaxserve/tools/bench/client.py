"""Sends one streamed request to any OpenAI-compatible server and records when its text arrived.

Every request asks for greedy decoding, a stream with usage at its end, and exactly `max_tokens` tokens (`ignore_eos`).
Strict servers reject fields that they do not know: `settle` finds these with small requests and omits them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp

from jaxserve.tools.bench.workload import Form, Prompt
from jaxserve.tools.client import RemoteError, deltas

Backend = Literal["openai-chat", "openai"]
"""Chat completions or completions, by the names of `vllm bench serve`."""

ENDPOINTS: Mapping[Backend, str] = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}
FORMS: Mapping[Backend, Form] = {"openai-chat": "chat", "openai": "text"}
REFUSABLE_FIELDS = ("stream_options", "ignore_eos")
REFUSALS = (400, 422)
MAX_STALE_CONNECTIONS = 3

ErrorKind = Literal["http", "connection", "timeout", "stream", "engine"]
"""Rejected with a status, not answered, timed out, broken off in the stream; or, offline, an error of the engine."""


class BenchmarkError(Exception):
    """The run cannot start: no server, no model, or a server that rejects the requests."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One endpoint of one server."""

    url: str
    """Base URL without a slash at its end."""
    endpoint: str
    model: str
    form: Form
    extra_body: Mapping[str, Any]
    """Fields of every request, over the default ones; None removes a field."""
    omitted_fields: tuple[str, ...] = ()
    """Fields that the server rejected."""

    def body(self, prompt: Mapping[str, Any], num_output_tokens: int) -> dict[str, Any]:
        fields = {
            "model": self.model,
            **prompt,
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
        }
        return {name: value for name, value in fields.items() if value is not None and name not in self.omitted_fields}


async def settle(session: aiohttp.ClientSession, target: Target) -> Target:
    """Return `target` without the fields that its server rejects. Raises BenchmarkError if it rejects the rest too."""
    url = target.url + target.endpoint
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if target.form == "chat" else {"prompt": "hello"}
    while True:
        body = target.body(prompt, 1)
        try:
            async with session.post(url, json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise BenchmarkError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return target
        refused = [name for name in REFUSABLE_FIELDS if name in text and name in body]
        if response.status not in REFUSALS or not refused:
            raise BenchmarkError(f"{url} answered {response.status} to a small request: {text[:300]}")
        target = replace(target, omitted_fields=(*target.omitted_fields, *refused))


async def send(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> RequestRecord:
    """Stream one request to its end. A failure is recorded, not raised."""
    body = target.body(prompt.body, prompt.num_output_tokens)
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
        if usage := delta.usage:
            record.has_usage = True
            record.num_prompt_tokens, record.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not record.chunk_times_s and not record.num_output_tokens:
        record.fail("stream", "the stream ended without text")
