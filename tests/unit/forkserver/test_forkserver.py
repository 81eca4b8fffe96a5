"""Each job gets a reply: from its child, or about a child that the kernel ended; and a process that dies is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from jaxserve.errors import UnavailableError
from jaxserve.forkserver.client import ForkServerClient
from jaxserve.forkserver.frames import Frames, framed

LARGE = b"x" * (1 << 20)
"""More than a pipe holds."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


@asynccontextmanager
async def running(max_jobs: int = 4) -> AsyncIterator[ForkServerClient]:
    made = ForkServerClient("tests.unit.forkserver.service", "echoes", max_jobs=max_jobs, timeout_s=1)
    try:
        yield made
    finally:
        await made.aclose()


async def ask(client: ForkServerClient, job: bytes) -> bytes:
    return await client.ask(job, lambda: b"first", bytes)


async def held(client: ForkServerClient) -> asyncio.Task[bytes]:
    """Stop the process and return a job that waits for its reply."""
    assert client.process is not None
    os.kill(client.process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(ask(client, b"held"))
    await turns_of_the_loop()  # it asks, and waits for the reply
    return waiting


async def turns_of_the_loop() -> None:
    """Let every task that is ready run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_frames_are_cut_wherever_the_stream_is_divided() -> None:
    sent = [(7, b""), (1 << 40, b"abc"), (0, bytes(300))]
    stream = b"".join(framed(*frame) for frame in sent)
    for size in (1, 5, 16, 17, len(stream)):
        frames = Frames()
        pushed = (frames.push(stream[start : start + size]) for start in range(0, len(stream), size))
        assert [frame for found in pushed for frame in found] == sent


async def test_jobs_run_beside_one_another_and_get_their_own_replies() -> None:
    async with running() as client:
        jobs = [b"a", LARGE, b"", b"spin", b"b", b"grow", b"crash"]
        replies = await asyncio.gather(*(ask(client, job) for job in jobs))
        assert replies == [b"first a", b"first " + LARGE, b"first ", b"timeout", b"first b", b"ended", b"ended"]
        process = client.process
        assert await ask(client, b"c") == b"first c" and client.process is process  # the children ended, not the server


async def test_its_death_fails_what_waits_and_the_next_job_starts_another(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as client:
        await ask(client, b"")
        waiting = await held(client)
        assert client.process is not None
        client.process.kill()
        with pytest.raises(UnavailableError, match=r"The process that echoes ended\. Please retry"):
            await waiting
        assert [record.getMessage() for record in caplog.records] == ["the process that echoes ended with -9"]
        caplog.clear()
        assert await ask(client, b"again") == b"first again"
    assert caplog.records == []  # an end that its owner wants is no error


async def test_a_machine_without_room_for_a_child_fails_one_job(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as client:
        with pytest.raises(UnavailableError, match=r"The process that echoes cannot start a child now\. Please retry"):
            await client.ask(b"a", lambda: b"full", bytes)
        process = client.process
        assert await ask(client, b"b") == b"full b" and client.process is process
    (record,) = caplog.records
    assert record.getMessage().startswith("the process that echoes cannot start a child")


async def test_a_process_that_hangs_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async with running(max_jobs=1) as client:
        await ask(client, b"")
        hanging = client.process
        assert hanging is not None
        client.deadline_s = 0.01
        waiting = await held(client)
        with pytest.raises(UnavailableError, match="The process that echoes ended"):
            await waiting
        assert await hanging.wait() == -signal.SIGKILL
        assert caplog.records[0].getMessage() == "the process that echoes did not answer within 0.01 s"
        client.deadline_s = 60
        assert await ask(client, b"next") == b"first next"


async def test_a_job_keeps_its_turn_when_its_caller_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that disconnects ends no child, so it must not let another one start."""
    async with running(max_jobs=2) as client:
        await ask(client, b"")
        process, sent = client.process, 0
        assert process is not None and process.stdin is not None
        write = process.stdin.write

        def counted(data: bytes) -> None:
            nonlocal sent
            sent += 1
            write(data)

        monkeypatch.setattr(process.stdin, "write", counted)
        os.kill(process.pid, signal.SIGSTOP)
        first = [asyncio.create_task(ask(client, b"left")) for _ in range(2)]
        await turns_of_the_loop()
        others = [asyncio.create_task(ask(client, b"%d" % index)) for index in range(3)]
        for task in first:
            task.cancel()
        await turns_of_the_loop()
        assert sent == 2
        others.pop().cancel()  # it waits for its turn, and is never sent
        os.kill(process.pid, signal.SIGCONT)
        assert await asyncio.gather(*others) == [b"first 0", b"first 1"]
        assert sent == 4
