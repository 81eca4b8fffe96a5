"""Additional API processes that die or freeze at a bad time."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.runtime import api_worker
from jaxserve.runtime.api_worker import ApiWorker
from jaxserve.runtime.api_workers import ApiWorkers


async def worker_that_runs(script: str) -> ApiWorker:
    return ApiWorker(await asyncio.create_subprocess_exec("sh", "-c", script, stdin=PIPE, stdout=PIPE))


async def test_an_upgrade_does_not_wait_for_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = await worker_that_runs("exit 0")
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
    worker = await worker_that_runs("echo alive; exec sleep 60")
    async with asyncio.timeout(30):
        assert "gave no sign of life for 0.2 s" in await worker.wait_lost(0.1, 0)
    assert worker.has_ended
