"""Streams of text beside other requests, for `benchmarks.images`: how long they pause."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import numpy as np

from jaxserve.runtime.tasks import running
from jaxserve.tools.client import deltas

LOADS: Final = ("alone", "beside prompts of text", "beside a picture every 5 s", "beside pictures")
"""Loads beside the streams. Prompts, and pictures without an interval, come one right after the other."""
INTERVAL_S: Final = 5.0
NUM_STREAMS: Final = 4
PROMPT_TOKENS: Final = 128
"""Tokens that a step computes on a CPU by default."""
FIRST_TOKEN, LAST_TOKEN = 40, 300


@dataclass
class Pauses:
    """Seconds between two events of a stream, and how many other requests ended meanwhile."""

    seconds: list[float] = field(default_factory=list)
    num_requests: int = 0

    def add(self, other: Pauses) -> None:
        self.seconds += other.seconds
        self.num_requests += other.num_requests

    def row(self) -> str:
        """Return the columns of a row of Markdown."""
        p50, p99 = (1000 * float(np.percentile(self.seconds, percent)) for percent in (50, 99))
        return f"{len(self.seconds)} | {p50:.1f} | {p99:.1f} | {1000 * max(self.seconds):.1f} | {self.num_requests}"


async def watch_streams(url: str, load: str, pictures: list[dict[str, Any]], seconds: float) -> Pauses:
    """Return the pauses of streams while the server has a load. pictures: requests with a new picture each."""
    found, end = Pauses(), asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        started = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(_stream(session, url, each, end, found)) for each in started]
        for each in started:
            await each.wait()
        found.seconds.clear()  # from here on all of them run
        async with running(_send(session, url, load, pictures, found)):
            await asyncio.sleep(seconds)
        end.set()
        await asyncio.gather(*streams)
    return found


async def _stream(
    session: aiohttp.ClientSession, url: str, started: asyncio.Event, end: asyncio.Event, found: Pauses
) -> None:
    """Read one stream after the other until the end."""
    while not end.is_set():
        # A model of random weights repeats special tokens; without text they would have no events.
        body = _body(16) | {"max_tokens": 900, "stream": True, "ignore_eos": True, "skip_special_tokens": False}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            last_s: float | None = None
            async for delta in deltas(response):
                if last_s is not None and delta.arrived_s > last_s:
                    found.seconds.append(delta.arrived_s - last_s)
                last_s = delta.arrived_s
                started.set()
                if end.is_set():
                    return


def _body(num_tokens: int) -> dict[str, Any]:
    """Return a request with a random prompt."""
    prompt = [random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]
    return {"model": "model", "prompt": prompt, "temperature": 0}


async def _send(
    session: aiohttp.ClientSession, url: str, load: str, pictures: list[dict[str, Any]], found: Pauses
) -> None:
    if load == LOADS[0]:
        return
    for number in itertools.count():
        is_text = load == LOADS[1]
        body = _body(PROMPT_TOKENS) | {"max_tokens": 1} if is_text else pictures[number % len(pictures)]
        started_s = time.perf_counter()
        async with session.post(f"{url}/v1/{'' if is_text else 'chat/'}completions", json=body) as response:
            await response.read()
            response.raise_for_status()
        found.num_requests += 1
        if load == LOADS[2]:
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.perf_counter() - started_s)))
