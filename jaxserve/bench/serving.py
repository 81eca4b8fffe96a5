"""`jaxserve bench serve`: loads a running server and reports throughput and latencies.

Requests start either as fast as `max_concurrency` allows (a closed loop) or at random moments of a Poisson
process with `request_rate` a second; both limits may hold together.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.bench.client import RequestRecord, send
from jaxserve.bench.prompts import Prompt, PromptMaker
from jaxserve.bench.report import summarise
from jaxserve.bench.workload import Workload


class BenchmarkError(Exception):
    """The run cannot start: no server, no model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One run."""

    url: str
    model: str | None
    """None: the first model that the server lists."""
    workload: Workload
    num_prompts: int
    num_warmups: int
    max_concurrency: int | None
    request_rate: float
    """Requests a second; infinite: no waiting between them."""
    seed: int
    api_key: str | None
    timeout_s: float


async def run_load(load: Load, *, on_done: Callable[[RequestRecord], None]) -> dict[str, Any]:
    """The figures of one run. `on_done` is called for every finished request.

    Raises BenchmarkError when the server does not answer, TokenizeError when prompts cannot be made.
    """
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    # Two runs must not differ by connection reuse, and the default limit of 100 connections would be a hidden queue.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        model = load.model or await _first_model(session, load.url)
        maker = PromptMaker(session, url=load.url, model=model, workload=load.workload, seed=load.seed)
        prompts = await maker.make(load.num_warmups + load.num_prompts)
        for prompt in prompts[: load.num_warmups]:
            await send(session, load.url, model, prompt)
        started_s = time.perf_counter()
        records = await _send_all(session, load, model, prompts[load.num_warmups :], on_done)
        duration_s = time.perf_counter() - started_s
    return _heading(load, model) | summarise(records, duration_s=duration_s)


async def _send_all(
    session: aiohttp.ClientSession,
    load: Load,
    model: str,
    prompts: list[Prompt],
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    places = asyncio.Semaphore(load.max_concurrency or len(prompts))
    chance = random.Random(load.seed)

    async def send_one(prompt: Prompt) -> RequestRecord:
        async with places:
            record = await send(session, load.url, model, prompt)
        on_done(record)
        return record

    tasks: list[asyncio.Task[RequestRecord]] = []
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            tasks.append(group.create_task(send_one(prompt)))
            if math.isfinite(load.request_rate):
                await asyncio.sleep(chance.expovariate(load.request_rate))
    return [task.result() for task in tasks]


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            reply = await response.json(content_type=None)
            if response.status != 200:
                raise BenchmarkError(f"{url}/v1/models answered {response.status}: {str(reply)[:200]}")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise BenchmarkError(f"no server at {url}: {error}") from error
    return str(reply["data"][0]["id"])


def _heading(load: Load, model: str) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        "workload": load.workload.name,
        "num_prompts": load.num_prompts,
        "num_warmups": load.num_warmups,
        "max_concurrency": load.max_concurrency,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "seed": load.seed,
    }
