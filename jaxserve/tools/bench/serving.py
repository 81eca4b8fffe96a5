"""`jaxserve bench serve`: loads a running server and reports throughput and latencies.

Requests start as fast as `max_concurrency` allows (a closed loop) or at random times, `request_rate` per second (an open
loop); both limits may apply.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from jaxserve.tools.bench.client import ENDPOINTS, FORMS, Backend, RequestRecord, Target, send, settle
from jaxserve.tools.bench.report import DEFAULT_PERCENTILES, GoodputMetric, details, summarise
from jaxserve.tools.bench.tokens import TokenizeError, TokenSource, find_tokens
from jaxserve.tools.bench.workload import Prompt, PromptMaker, Workload
from jaxserve.tools.client import first_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Load of one run."""

    num_prompts: int
    max_concurrency: int | None
    repeat: int = 0
    """Number of earlier runs of the sweep with the same concurrency; each run has prompts of its own."""

    @property
    def name(self) -> str:
        name = "all" if self.max_concurrency is None else str(self.max_concurrency)
        return f"{name}#{self.repeat}" if self.repeat else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A server, the requests to it, and the form of the report."""

    url: str
    workload: Workload
    model: str | None = None
    """Model name; None: the first one that the server lists."""
    backend: Backend = "openai-chat"
    endpoint: str | None = None
    """Path of the requests; None: the backend's."""
    tokenizer: Path | None = None
    """Local tokenizer; None: the server's `/tokenize`."""
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_warmups: int = 0
    """Requests before the clock starts, in every run."""
    request_rate: float = math.inf
    """Requests a second; infinite: no waiting between them."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the time between two requests: 1 is a Poisson process, less makes bursts, more
    is more even."""
    seed: int = 0
    api_key: str | None = None
    timeout_s: float = 3600.0
    keep_alive: bool = False
    """True to reuse connections. Without reuse, runs do not differ by which connections were reused."""
    percentiles: Sequence[float] = DEFAULT_PERCENTILES
    goodput_ms: Mapping[GoodputMetric, float] = dataclasses.field(default_factory=dict)
    save_detailed: bool = False


class Server:
    """A server whose model, tokenizer and rejected fields are known. Made by `connected`."""

    def __init__(self, session: aiohttp.ClientSession, load: Load, target: Target, tokens: TokenSource) -> None:
        self._session = session
        self._load = load
        self.target = target
        self._tokens = tokens
        self._maker = PromptMaker(tokens, load.workload, target.form, seed=load.seed)

    async def run(
        self, level: Level, *, on_start: Callable[[], None], on_done: Callable[[RequestRecord], None]
    ) -> dict[str, Any]:
        """Return the figures of one run. on_start is called when the clock starts, on_done for every finished request.

        Raises TokenizeError if prompts cannot be made.
        """
        num_warmups = self._load.num_warmups
        prompts = await self._maker.make(num_warmups + level.num_prompts, run=level.name)
        for prompt in prompts[:num_warmups]:
            await send(self._session, self.target, prompt)
        on_start()
        started_s = time.perf_counter()
        records = await self._send_all(prompts[num_warmups:], level, on_done)
        duration_s = time.perf_counter() - started_s
        source = await self._count_outputs(records)
        load = self._load
        figures = self._heading(level) | {"output_tokens_from": source}
        figures |= summarise(
            records, duration_s=duration_s, percentiles=load.percentiles, goodput_ms=load.goodput_ms or None
        )
        return figures | (details(records) if load.save_detailed else {})

    async def _send_all(
        self, prompts: Sequence[Prompt], level: Level, on_done: Callable[[RequestRecord], None]
    ) -> list[RequestRecord]:
        places = asyncio.Semaphore(level.max_concurrency or len(prompts))
        start_s = time.perf_counter()

        async def send_one(prompt: Prompt, wait_s: float) -> RequestRecord:
            # Start times are fixed beforehand: a slow server or client must not reduce the load.
            await asyncio.sleep(max(0.0, start_s + wait_s - time.perf_counter()))
            async with places:
                record = await send(self._session, self.target, prompt)
            on_done(record)
            return record

        starts_s = arrivals(len(prompts), self._load.request_rate, self._load.burstiness, self._load.seed)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(send_one(prompt, start_time_s))
                for prompt, start_time_s in zip(prompts, starts_s, strict=True)
            ]
        return [task.result() for task in tasks]

    async def _count_outputs(self, records: Sequence[RequestRecord]) -> str:
        """Count the output tokens of requests without usage; returns the source of the counts."""
        done = [record for record in records if record.error is None]
        uncounted = [record for record in done if not record.has_usage]
        if not uncounted:
            return "usage"
        source = "tokenizer"
        for record in uncounted:
            try:
                token_ids = await self._tokens.text_ids("".join(record.text), add_special_tokens=False)
                record.num_output_tokens = len(token_ids)
            except TokenizeError:  # the server is gone: keep the measurements
                record.num_output_tokens = len(record.chunk_times_s)
                source = "chunks"
        return source if len(uncounted) == len(done) else f"usage and {source}"

    def _heading(self, level: Level) -> dict[str, Any]:
        load = self._load
        return {
            "date": time.strftime("%Y%m%d-%H%M%S"),
            "backend": load.backend,
            "endpoint": self.target.endpoint,
            "model_id": self.target.model,
            "tokenizer_id": self._tokens.name,
            "workload": load.workload.name,
            "num_prompts": level.num_prompts,
            "num_warmups": load.num_warmups,
            "max_concurrency": level.max_concurrency,
            "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
            "burstiness": load.burstiness,
            "seed": load.seed,
            "omitted_fields": list(self.target.omitted_fields),
        }


@asynccontextmanager
async def connected(load: Load) -> AsyncIterator[Server]:
    """Yield the server of `load` after asking it for its model, its tokenizer and the fields that it rejects.

    Raises RemoteError or BenchmarkError if it does not answer, TokenizeError if no source counts tokens.
    """
    async with _session(load, keep_alive=False) as asking, _session(load, keep_alive=load.keep_alive) as loading:
        model = load.model or await first_model(asking, load.url)
        target = Target(
            url=load.url,
            endpoint=load.endpoint or ENDPOINTS[load.backend],
            model=model,
            form=FORMS[load.backend],
            extra_body=load.extra_body,
        )
        tokens = await find_tokens(asking, load.url, model, tokenizer=load.tokenizer)
        yield Server(loading, load, await settle(asking, target), tokens)


def _session(load: Load, *, keep_alive: bool) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {load.api_key}"} if load.api_key else {},
        # The default limit of 100 connections would be a hidden queue.
        connector=aiohttp.TCPConnector(limit=0, force_close=not keep_alive),
        timeout=aiohttp.ClientTimeout(total=load.timeout_s if math.isfinite(load.timeout_s) else None),
    )


def arrivals(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the start times of `count` requests, in seconds."""
    if math.isinf(request_rate):
        return [0.0] * count
    chance = random.Random(f"{seed}/arrivals")
    starts_s, now_s = [], 0.0
    for _ in range(count):
        starts_s.append(now_s)
        now_s += chance.gammavariate(burstiness, 1.0 / (request_rate * burstiness))
    return starts_s
