"""Sends one streamed request and notes when its text arrived."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxserve.bench.prompts import Prompt

DONE = "[DONE]"


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times are `time.perf_counter()` seconds."""

    started_s: float
    finished_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    """When each chunk with text came."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


async def send(session: aiohttp.ClientSession, url: str, model: str, prompt: Prompt) -> RequestRecord:
    """Stream one request to its end. A failure is noted in the record and never raised."""
    body = {
        "model": model,
        **prompt.body,
        "max_tokens": prompt.lengths.num_output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = RequestRecord(started_s=time.perf_counter())
    try:
        async with session.post(url + prompt.path, json=body) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read_stream(response, record)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.finished_s = time.perf_counter()
    return record


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    async for data in _events(response):
        if data == DONE:
            break
        chunk = json.loads(data)
        if "error" in chunk:
            record.error = f"in the stream: {str(chunk['error'].get('message'))[:200]}"
            return
        if any(_has_text(choice) for choice in chunk.get("choices", ())):
            record.chunk_times_s.append(time.perf_counter())
        if usage := chunk.get("usage"):
            _note_usage(record, usage)
    else:
        record.error = f"the stream ended without {DONE}"
        return
    if record.num_output_tokens == 0:
        record.error = "the stream ended without usage"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The payload of every `data:` line; comments and blank lines are skipped."""
    async for line in response.content:
        text = line.decode("utf-8").strip()
        if text.startswith("data:"):
            yield text.removeprefix("data:").strip()


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def _note_usage(record: RequestRecord, usage: dict[str, Any]) -> None:
    record.num_prompt_tokens = usage["prompt_tokens"]
    record.num_output_tokens = usage["completion_tokens"]
    record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
