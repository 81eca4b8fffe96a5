"""The time before readiness: progress, early requests, failures and a stop in the middle."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.engine.process import start_executor
from jaxserve.errors import CheckpointError, StartupError
from jaxserve.executor.protocol import Executor, Progress
from jaxserve.ipc.address import new_address
from jaxserve.ipc.messages import Hello, StartupFailed, StartupProgress, StepOutputs
from jaxserve.ipc.transport import ClientSocket, EngineSocket
from tests.engine.rig import Rig, add

Build = Callable[[Progress], Executor]


class Startup:
    """`start_executor` in a thread, with a build that the test steers."""

    def __init__(self, directory: Path) -> None:
        self.address = new_address(str(directory))
        self.go_on = threading.Event()
        self.stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def begin(self, build: Build) -> Future[Executor | None]:
        return self._pool.submit(self._run, build)

    def _run(self, build: Build) -> Executor | None:
        socket = EngineSocket(self.address)
        try:
            return start_executor(build, socket, self.stop.is_set)
        finally:
            socket.close(linger_s=1.0)

    def close(self) -> None:
        self.stop.set()
        self.go_on.set()
        self._pool.shutdown()


@pytest.fixture
def startup(tmp_path: Path) -> Iterator[Startup]:
    startup = Startup(tmp_path)
    yield startup
    startup.close()


@pytest.fixture
def connection(startup: Startup) -> Iterator[ClientSocket]:
    connection = ClientSocket(startup.address)
    yield connection
    connection.close()


async def test_hello_is_answered_with_progress_and_requests_with_an_error(
    startup: Startup, connection: ClientSocket
) -> None:
    executor = Rig().executor

    def build(progress: Progress) -> Executor:
        progress("load", 7, 7, "")
        progress("compile", 1, 3, "decode/1")
        startup.go_on.wait()
        return executor

    done = startup.begin(build)
    await connection.send(Hello())
    message = await connection.receive()
    while message != StartupProgress("compile", 1, 3, "decode/1"):
        assert message == StartupProgress("load", 7, 7, "")
        message = await connection.receive()
    await connection.send(add("early", [1]))
    answer = await connection.receive()
    assert isinstance(answer, StepOutputs)
    (end,) = answer.outputs
    assert end.error is not None
    assert (end.finish_reason, end.error.error_class) == ("error", "UnavailableError")
    startup.go_on.set()
    assert done.result() is executor


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckpointError("a.gguf: tensor x is cut short"), "a.gguf: tensor x is cut short"),
        (KeyError("x"), "the engine could not start: KeyError: 'x'"),
        (ValueError("first\nsecond"), "the engine could not start: ValueError: first"),
    ],
)
async def test_failure_is_sent_to_a_client_that_greets_only_afterwards(
    startup: Startup, connection: ClientSocket, error: Exception, line: str
) -> None:
    def build(progress: Progress) -> Executor:
        raise error

    done = startup.begin(build)
    await connection.send(Hello())
    assert await connection.receive() == StartupFailed(line)
    with pytest.raises(StartupError):
        done.result()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 755343360 bytes.\nmore"), "755343360 bytes."),
        (MemoryError(), "no details"),
    ],
)
async def test_a_start_without_enough_memory_is_one_line_that_says_what_to_do(
    startup: Startup, connection: ClientSocket, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def build(progress: Progress) -> Executor:
        raise error

    startup.begin(build)
    await connection.send(Hello())
    message = await connection.receive()
    assert isinstance(message, StartupFailed)
    assert re.fullmatch(
        rf"the engine could not start: out of memory \(.*{re.escape(said)}\); `jaxserve plan MODEL` says what fits; .+",
        message.message,
    )
    assert not caplog.records, "no traceback"


def test_stop_does_not_wait_for_the_build(startup: Startup) -> None:
    def build(progress: Progress) -> Executor:
        startup.go_on.wait()
        raise StartupError("too late")

    done = startup.begin(build)
    startup.stop.set()
    assert done.result() is None
