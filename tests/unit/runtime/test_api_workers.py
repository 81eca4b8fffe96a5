"""Additional API processes that die or freeze at a bad time."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import StartupError
from jaxserve.runtime import api_worker, api_workers, spawn
from jaxserve.runtime.api_worker import Accept, ApiWorker, NextEngine, Order
from jaxserve.runtime.api_workers import ApiWorkers
from jaxserve.runtime.tasks import running


@contextlib.asynccontextmanager
async def worker_that_runs(script: str) -> AsyncIterator[ApiWorker]:
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdin=PIPE, stdout=PIPE)
    worker = ApiWorker(process, num_oom_kills=1)
    yield worker
    await worker.kill()
    process._transport.close()  # type: ignore[attr-defined]
    await asyncio.sleep(0)  # the pipes are closed by callbacks


async def test_an_upgrade_does_not_wait_for_a_process_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker_that_runs("exit 0") as dead:
        assert not await dead.wait_ready()

        workers = await workers_with(dead, monkeypatch)
        async with asyncio.timeout(10):
            await workers.suspend()


async def test_a_process_that_freezes_is_found_without_a_limit_on_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_worker, "MIN_SILENCE_S", 0.2)
    async with worker_that_runs("echo alive; exec sleep 60") as worker:
        async with asyncio.timeout(30):
            assert "gave no sign of life for 0.2 s" in await worker.wait_lost(0.1, 0)
        assert worker.has_ended


async def test_a_process_that_freezes_soon_after_its_start_is_found_although_that_may_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_worker, "MIN_SILENCE_S", 0.2)
    async with worker_that_runs("sleep 0.2; echo alive; exec sleep 600") as worker, asyncio.timeout(60):
        assert "gave no sign of life for 0.2 s" in await worker.wait_lost(0.1, startup_s=10_000)


@pytest.mark.parametrize(("num_kills", "number"), [(1, "KILL"), (2, "KILL"), (2, "TERM")])
async def test_a_process_that_the_kernel_killed_for_lack_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, num_kills: int, number: str
) -> None:
    """At the start of the server and later."""
    monkeypatch.setattr(spawn, "oom_kills", lambda: num_kills)
    async with worker_that_runs(f"kill -{number} $$") as worker:
        workers = await workers_with(worker, monkeypatch)
        with pytest.raises(StartupError) as error:
            await workers.wait_ready()
        lost = await worker.wait_lost(0, 0)
    assert lost.startswith(f"was ended by signal {signal.Signals[f'SIG{number}']:d}")
    assert ("for lack of memory" in lost) == (num_kills == 2 and number == "KILL")
    assert str(error.value) == f"API process 1 {lost}"


@pytest.fixture
def stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time for the end of a process but its silence."""
    for name in ("STOP_GRACE_S", "DEATH_GRACE_S", "ABORT_FLUSH_S"):
        monkeypatch.setattr(api_workers, name, 0.01)


async def workers_with(worker: ApiWorker, monkeypatch: pytest.MonkeyPatch, *replacements: ApiWorker) -> ApiWorkers:
    """Return workers with one process, which is replaced by others if it is watched and ends."""
    processes = iter((worker, *replacements))

    async def start(module: str, line: bytes, listeners: object) -> ApiWorker:
        return next(processes)

    monkeypatch.setattr(ApiWorker, "start", start)
    workers = ApiWorkers(Config(model=ModelConfig(model="tiny")), Path(), "ipc:///x", [[]])
    await workers.start(is_successor=False)
    return workers


@pytest.mark.usefixtures("stops_at_once")
async def test_a_process_that_takes_long_to_send_its_errors_is_not_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It reads the order to stop, and sends signs of life until the test lets it end."""
    done = tmp_path / "done"
    monkeypatch.setattr(api_worker, "MIN_SILENCE_S", 60.0)
    async with worker_that_runs(f"read order; while ! [ -e {done} ]; do echo alive; sleep 0.02; done; exit 7") as slow:
        workers = await workers_with(slow, monkeypatch)
        await workers.fail("the engine is gone")
        ending = asyncio.create_task(workers.wait_ended())
        async with asyncio.timeout(60):
            while slow._num_lines < 20:  # noqa: ASYNC110  (lines of another process)
                await asyncio.sleep(0.01)
            assert not ending.done() and not slow.has_ended
            done.touch()
            await ending
        assert slow.process.returncode == 7, "it ended by itself"


@pytest.mark.usefixtures("stops_at_once")
async def test_a_process_that_gives_no_sign_of_life_when_it_is_to_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_worker, "MIN_SILENCE_S", 0.2)
    async with worker_that_runs("echo alive; exec sleep 600") as frozen:
        workers = await workers_with(frozen, monkeypatch)
        await workers.fail("the engine is gone")
        async with asyncio.timeout(60):
            await workers.wait_ended()
        assert frozen.process.returncode == -signal.SIGKILL


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


@pytest.mark.parametrize(
    ("script", "is_ready"),
    [("sleep 0.5; printf 'alive\\nready\\n'; exec sleep 60", True), ("echo alive; exec sleep 60", False)],
    ids=["slow start", "no engine"],
)
async def test_a_replacement_leaves_connections_in_the_queue_until_it_is_ready_or_finds_no_engine(
    script: str, is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is ready, requests of connections that it accepts get 503."""
    monkeypatch.setattr(api_workers, "ACCEPT_S", 0.05)
    accepting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def send(worker: ApiWorker, order: Order) -> None:
        assert order == Accept()
        accepting.set_result(worker._is_ready)

    async with worker_that_runs("exit 0") as dead, worker_that_runs(script) as replacement:
        workers = await workers_with(dead, monkeypatch, replacement)
        monkeypatch.setattr(ApiWorker, "send", send)
        async with running(workers.supervise()), asyncio.timeout(60):
            assert await accepting is is_ready


@pytest.mark.usefixtures("stops_at_once")
async def test_a_process_that_was_being_started_when_the_server_was_stopped_does_not_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = ApiWorkers(Config(model=ModelConfig(model="tiny")), Path(), "ipc:///x", [[]])
    async with worker_that_runs("while :; do echo alive; sleep 0.02; done") as late:

        async def start(module: str, line: bytes, listeners: object) -> ApiWorker:
            workers.terminate()  # reaches the processes that run
            return late

        monkeypatch.setattr(ApiWorker, "start", start)
        await workers.start(is_successor=False)
        async with asyncio.timeout(10):
            await workers.wait_ended()
        assert late.has_ended


async def test_a_process_that_starts_reads_keys_and_certificate_again_once_it_handles_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with worker_that_runs(
        "sleep 0.3; trap 'echo reloaded' HUP; echo alive; while :; do sleep 0.02; done"
    ) as worker:
        workers = await workers_with(worker, monkeypatch)
        workers.reload()
        workers.reload()
        for num_lines in (2, 3):
            async with asyncio.timeout(60):
                while worker._num_lines < num_lines:
                    assert not worker.is_silent, "the signal has ended it"
                    await asyncio.sleep(0.01)
            workers.reload()
