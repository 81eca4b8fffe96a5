"""Engines that do not start again: one that hangs is replaced after --startup-timeout, public pages name no file, and
one that is given up does not hold up the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.frontend.engine_client.client import EngineClient
from jaxserve.frontend.engine_client.connection import EngineConnection
from jaxserve.frontend.engine_client.watch import STALL_LOOKS
from jaxserve.ipc.engine_spec import EngineSpec
from jaxserve.ipc.messages import Ready, StartupFailed, StartupProgress
from jaxserve.metrics import Metrics, exposition
from jaxserve.runtime import engine_supervisor
from jaxserve.runtime.engine_supervisor import EngineSupervisor
from jaxserve.runtime.spawn import exit_text
from tests.loop_clock import LoopClock
from tests.unit.running_api import ALONE, MODEL_INFO, ScriptedEngine

STARTUP_TIMEOUT_S = 8.0


class Process:
    """A process that ends when the test says so, or when it is killed."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._has_ended = asyncio.Event()

    @property
    def exit_text(self) -> str:
        return f"the engine process {exit_text(self.returncode, 0)}"

    async def wait(self) -> int | None:
        await self._has_ended.wait()
        return self.returncode

    def ask_for_record(self) -> None:
        """Write nothing."""

    def kill(self) -> None:
        self.returncode = -9
        self._has_ended.set()


class Engines:
    """The engines of one server, one after the other, and the model that they serve."""

    def __init__(self) -> None:
        self.label = ""
        self.metrics = Metrics("tiny")
        self.frontend = SimpleNamespace(metrics=self.metrics)
        self.client = EngineClient(
            self.metrics,
            max_queued_requests=5,
            stall_timeout_s=0.0,
            startup_timeout_s=STARTUP_TIMEOUT_S,
            peers=ALONE,
        )
        self.scripts: list[ScriptedEngine] = []
        self.processes: list[Process] = []
        self.started: asyncio.Queue[int] = asyncio.Queue()
        self.back = asyncio.Event()

    @contextlib.asynccontextmanager
    async def connected(self, address: str, replica: int) -> AsyncIterator[EngineConnection]:
        self.scripts.append(ScriptedEngine())
        async with self.client.connected(self.scripts[-1]) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def engine_process(self, *args: object) -> AsyncIterator[Process]:
        self.processes.append(Process())
        self.started.put_nowait(len(self.processes))
        yield self.processes[-1]

    def record_start(self, *args: object) -> None:
        self.back.set()


async def test_an_engine_that_hangs_while_it_starts_again_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engines, clock = Engines(), LoopClock()
    monkeypatch.setattr(engine_supervisor, "engine_process", engines.engine_process)
    spec = EngineSpec(config=Config(model=ModelConfig(model="m")), model_path="", address="ipc:///x/engine")

    async def on_next(replica: int, address: str | None) -> None:
        assert address is not None, "an engine follows"

    supervisor = EngineSupervisor(cast(Any, engines), spec, None, on_next)
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(10_000):
        assert await engines.started.get() == 1
        engines.scripts[0].say(Ready(MODEL_INFO))
        await supervisor._running.wait()
        supervisor.allow_restarts()
        engines.processes[0].kill()
        assert await engines.started.get() == 2
        engines.scripts[1].say(StartupProgress("load", 3, 99))
        while engines.started.empty():  # it makes no progress from here on
            await clock.advance(STARTUP_TIMEOUT_S / STALL_LOOKS)
        assert await engines.started.get() == 3
        engines.scripts[2].say(Ready(MODEL_INFO))
        await engines.back.wait()
    assert "the start of the engine made no progress for 8 s after 3 of 99 of phase 'load'" in caplog.text
    assert engines.client.require_ready() == MODEL_INFO
    assert b'engine_restarts_total{engine="0",model_name="tiny"} 2.0' in exposition(engines.metrics.snapshot())
    running.cancel()
    await asyncio.wait({running})


async def test_the_reason_of_a_failed_restart_is_in_the_log_and_not_at_health(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Probes need no key, and a server of several models goes on: the engine's words name its files."""
    engines, spec = (
        Engines(),
        EngineSpec(config=Config(model=ModelConfig(model="m")), model_path="", address="ipc:///x/e"),
    )
    monkeypatch.setattr(engine_supervisor, "engine_process", engines.engine_process)
    followers: list[str | None] = []

    async def on_next(replica: int, address: str | None) -> None:
        followers.append(address)

    supervisor = EngineSupervisor(cast(Any, engines), spec, None, on_next)
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(60):
        for number in range(1 + spec.config.server.engine_restarts):
            assert await engines.started.get() == number + 1
            if number:
                engines.scripts[number].say(StartupFailed("/srv/secret/model.safetensors: truncated"))
            else:
                engines.scripts[0].say(Ready(MODEL_INFO))
                await supervisor._running.wait()
                supervisor.allow_restarts()
                engines.processes[0].kill()
        reason = await running
    assert followers[-1] is None, "it is given up"
    assert engines.client.ailment() == reason == "the engine has not started"
    assert caplog.text.count("the engine has not started: /srv/secret/model.safetensors: truncated") == 3


async def test_an_engine_that_is_given_up_does_not_hold_up_the_resumption_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server of several engines serves again with those that are left when the one that was to replace it fails."""
    engines = Engines()
    spec = EngineSpec(config=Config(model=ModelConfig(model="m")), model_path="", address="ipc:///x/engine")
    monkeypatch.setattr(engine_supervisor, "engine_process", engines.engine_process)

    async def on_next(replica: int, address: str | None) -> None:
        """Tell no other process."""

    supervisor = EngineSupervisor(cast(Any, engines), spec, None, on_next)
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(60):
        assert await engines.started.get() == 1
        engines.scripts[0].say(Ready(MODEL_INFO))
        await supervisor._running.wait()
        supervisor.allow_restarts()
        await supervisor.suspend()
        resumed = asyncio.create_task(supervisor.resume())
        for number in range(1, 2 + spec.config.server.engine_restarts):
            assert await engines.started.get() == number + 1
            engines.scripts[number].say(StartupFailed("damaged"))
        assert await running == "the engine has not started"
        await asyncio.wait_for(resumed, 5)
        await supervisor.suspend()
