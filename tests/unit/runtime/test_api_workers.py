"""Additional API processes that die or freeze at a bad time."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.runtime import api_worker
from jaxserve.runtime.api_worker import ApiWorker
from jaxserve.runtime.api_workers import ApiWorkers, NextEngine


@contextlib.asynccontextmanager
async def worker_that_runs(script: str) -> AsyncIterator[ApiWorker]:
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdin=PIPE, stdout=PIPE)
    worker = ApiWorker(process)
    yield worker
    await worker.kill()
    process._transport.close()  # type: ignore[attr-defined]
    await asyncio.sleep(0)  # the pipes are closed by callbacks


async def test_an_upgrade_does_not_wait_for_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker_that_runs("exit 0") as dead:
        assert not await dead.wait_ready()

        async def start(module: str, line: bytes, listeners: object) -> ApiWorker:
            return dead

        monkeypatch.setattr(ApiWorker, "start", start)
        workers = ApiWorkers(Config(model=ModelConfig(model="tiny")), Path(), "ipc:///x", [[]])
        await workers.start(is_successor=False)
        async with asyncio.timeout(10):
            await workers.suspend()


async def test_a_process_that_freezes_is_found_without_a_limit_on_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_worker, "MIN_SILENCE_S", 0.2)
    async with worker_that_runs("echo alive; exec sleep 60") as worker:
        async with asyncio.timeout(30):
            assert "gave no sign of life for 0.2 s" in await worker.wait_lost(0.1, 0)
        assert worker.has_ended


class Orders:
    """A process that has just started, and the orders that it gets; another engine dies when the first one is sent."""

    def __init__(self) -> None:
        self.addresses: list[str | None] = []
        self.workers: ApiWorkers | None = None

    async def send(self, order: NextEngine) -> None:
        self.addresses.append(order.address)
        if len(self.addresses) == 1:
            assert self.workers is not None
            await self.workers.switch_engine(0, "ipc:///x.2")


async def test_a_started_process_learns_of_all_engines_that_died_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Orders()

    async def start(module: str, line: bytes, listeners: object) -> Orders:
        assert started.workers is not None
        await started.workers.switch_engine(0, "ipc:///x.1")
        return started

    monkeypatch.setattr(ApiWorker, "start", start)
    started.workers = ApiWorkers(Config(model=ModelConfig(model="tiny")), Path(), "ipc:///x", [[]])
    await started.workers.start(is_successor=True)
    assert started.addresses == ["ipc:///x.1", "ipc:///x.2"]
