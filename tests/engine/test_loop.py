"""The loop in its thread, on a real socket, with the fake executor."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import zmq

from jaxserve.engine.core import BROKEN_ERROR, STOP_ERROR, rejected
from jaxserve.engine.loop import EngineLoop
from jaxserve.executor.protocol import BrokenExecutorError
from jaxserve.ipc.address import new_address
from jaxserve.ipc.messages import (
    Abort,
    Command,
    CommandDone,
    EngineState,
    Heartbeat,
    Hello,
    PagesChanged,
    Ready,
    RequestOutput,
    StepOutputs,
)
from jaxserve.ipc.transport import ClientSocket, EngineSocket, ProtocolError, decode_from_engine
from jaxserve.routing.request import page_hashes
from jaxserve.types import RequestId
from tests.engine.rig import Rig, add, expected, prompt

ENDLESS = 19_000
"""Tokens of a request that no test waits for."""

Connect = Callable[[], Awaitable[ClientSocket]]


class Gate(threading.Event):
    """Open, unless a test holds a step: that one then lasts until a message has reached the engine's socket."""

    def __init__(self) -> None:
        super().__init__()
        self.set()
        self.socket: EngineSocket | None = None

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set():
            return True
        is_open = super().wait(timeout)
        assert self.socket is not None
        self.socket._poller.poll()  # in the thread that owns it
        return is_open


class Engine:
    """A loop in a thread. Its clock stands still, so heartbeats come only when a test moves it."""

    def __init__(self, directory: Path, publishes_pages: bool = False) -> None:
        self.now = 0.0
        self.gate = Gate()
        self.rig = Rig(num_blocks=5001, max_model_len=20_000, gate=self.gate, publishes_pages=publishes_pages)
        self.address = new_address(str(directory))
        self.exit_code: int | None = None
        self._stop = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._is_listening.wait()

    def stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            os.write(self._wake_writer, b"x")
            self._thread.join()
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _run(self) -> None:
        socket = EngineSocket(self.address)
        socket.wake_on(self._wake_reader)
        self.gate.socket = socket
        self._is_listening.set()
        loop = EngineLoop(self.rig.core, socket, self.rig.executor.model_info, lambda: self.now)
        self.exit_code = loop.run(self._stop.is_set)
        socket.close(linger_s=1.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.stop()


@pytest.fixture
async def connect(engine: Engine) -> AsyncIterator[Connect]:
    """Makes clients that were greeted; closes them."""
    connections: list[ClientSocket] = []

    async def connected() -> ClientSocket:
        connection = ClientSocket(engine.address)
        connections.append(connection)
        await connection.send(Hello())
        assert await connection.receive() == Ready(engine.rig.executor.model_info)
        return connection

    yield connected
    for connection in connections:
        connection.close()


async def first_output(connection: ClientSocket) -> RequestOutput:
    while True:
        message = await connection.receive()
        if isinstance(message, StepOutputs) and message.outputs:
            return message.outputs[0]


async def ending(connection: ClientSocket) -> tuple[list[int], RequestOutput]:
    """The tokens of the client's only request from here on, and its terminal message."""
    tokens: list[int] = []
    while True:
        output = await first_output(connection)
        tokens += output.token_ids
        if output.finish_reason is not None:
            return tokens, output


async def test_tokens_arrive_step_by_step_with_stats(connect: Connect) -> None:
    connection = await connect()
    message = add("r", prompt(5), max_tokens=4)
    await connection.send(message)
    num_steps = 0
    tokens: list[int] = []
    while len(tokens) < 4:
        step = await connection.receive()
        assert isinstance(step, StepOutputs)
        assert step.stats is not None
        num_steps += step.stats.num_steps
        tokens += step.outputs[0].token_ids
    assert tokens == expected(message)
    assert num_steps == 4


async def test_duplicate_id_of_another_client_is_rejected_to_its_sender_only(connect: Connect) -> None:
    first, second = await connect(), await connect()
    message = add("r", prompt(5), max_tokens=300)
    await first.send(message)
    head = await first_output(first)
    await second.send(add("r", prompt(3)))
    tokens, refusal = await ending(second)
    assert (tokens, refusal.finish_reason) == ([], "error")
    tokens, end = await ending(first)
    assert (head.token_ids + tokens, end.finish_reason) == (expected(message), "length")


async def test_abort_of_another_clients_request_is_ignored(connect: Connect) -> None:
    first, second = await connect(), await connect()
    await first.send(add("r", prompt(5), max_tokens=300))
    await first_output(first)
    await second.send(Abort([RequestId("r")]))
    await second.send(add("barrier", prompt(3), max_tokens=1))
    await ending(second)
    assert (await ending(first))[1].finish_reason == "length"


async def test_abort_sent_during_a_step_takes_effect_right_after_it(engine: Engine, connect: Connect) -> None:
    connection = await connect()
    engine.gate.clear()
    await connection.send(add("r", prompt(5), max_tokens=ENDLESS))
    while not engine.rig.scheduler.in_flight:  # noqa: ASYNC110  (a thread of its own)
        await asyncio.sleep(0)
    await connection.send(Abort([RequestId("r")]))
    engine.gate.set()
    tokens, end = await ending(connection)
    assert end.finish_reason == "abort"
    assert len(tokens) <= 2
    engine.stop()
    assert engine.rig.kv.usage == 0.0


async def test_damaged_request_is_answered_and_foreign_frames_are_survived(engine: Engine, connect: Connect) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(engine.address)
        raw.send(b"\xc1 nonsense")
        raw.send(b"\x94\xaaAddRequest\xa1r\x91\xa1x\x80")  # a prompt of strings
        answer = decode_from_engine(raw.recv())
        raw.close(linger=0)
    assert isinstance(answer, StepOutputs)
    (end,) = answer.outputs
    assert (end.request_id, end.finish_reason) == ("r", "error")
    connection = await connect()
    message = add("r", prompt(5), max_tokens=2)
    await connection.send(message)
    assert (await ending(connection))[0] == expected(message)


async def test_requests_of_a_lost_client_are_aborted(engine: Engine, connect: Connect) -> None:
    connection = await connect()
    await connection.send(add("r", prompt(5), max_tokens=ENDLESS))
    await first_output(connection)
    connection.close()
    while engine.rig.core.has_work:  # noqa: ASYNC110  (a thread of its own)
        await asyncio.sleep(0)
    engine.stop()
    assert engine.rig.kv.usage == 0.0


async def test_idle_engine_sends_one_heartbeat_a_second(engine: Engine, connect: Connect) -> None:
    connection = await connect()
    engine.now = 1.0
    assert isinstance(await connection.receive(), Heartbeat)
    await connection.send(Hello())
    assert isinstance(await connection.receive(), Ready)  # and no second heartbeat before it


async def test_stop_gives_every_request_its_end(engine: Engine, connect: Connect) -> None:
    connection = await connect()
    await connection.send(add("r", prompt(5), max_tokens=ENDLESS))
    await first_output(connection)
    engine.stop()
    assert engine.exit_code == 0
    assert (await ending(connection))[1].error == STOP_ERROR


async def test_requests_end_before_the_tiers_are_closed(engine: Engine, connect: Connect) -> None:
    may_close = threading.Event()
    tiers = Mock()
    tiers.close.side_effect = lambda: may_close.wait(10)
    engine.rig.core.tiers = tiers
    connection = await connect()
    await connection.send(add("r", prompt(5), max_tokens=ENDLESS))
    await first_output(connection)
    stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
    assert (await ending(connection))[1].error == STOP_ERROR
    assert not stopping.done()
    may_close.set()
    await stopping
    tiers.close.assert_called_once()


async def test_bug_in_the_loop_ends_every_request_and_the_engine(
    engine: Engine, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await connect()
    await connection.send(add("r", prompt(5), max_tokens=ENDLESS))
    await first_output(connection)

    def broken(plan: object, result: object) -> None:
        raise AssertionError("an invariant does not hold")

    monkeypatch.setattr(engine.rig.scheduler, "update", broken)
    assert (await ending(connection))[1].error == BROKEN_ERROR
    engine.stop()
    assert engine.exit_code == 1


def test_request_that_comes_early_in_a_long_step_joins_the_next_one() -> None:
    """The core returns how long to listen; the loop handles messages and listens again."""
    rig = Rig()
    patience = [0.5, 0.5, 0.25, 0.25, 0.0, 0.0]
    events: list[str] = []

    class Core:
        has_work, is_broken = True, False

        def patience_s(self) -> float:
            return patience.pop(0)

        def handle(self, message: object) -> list[RequestOutput]:
            events.append("added")
            return []

        def step(self) -> None:
            events.append("step")

    class Socket:
        def receive(self, timeout_s: float) -> list[tuple[bytes, object]]:
            events.append(f"listen {timeout_s}")
            return [] if timeout_s == 0.0 else [(b"client", add(f"r{timeout_s}", prompt(3)))]

        def claim(self, request_id: RequestId, client: bytes) -> None:
            pass

    loop = EngineLoop(Core(), Socket(), rig.executor.model_info, lambda: 0.0)  # type: ignore[arg-type]
    for _ in range(3):
        loop.turn()
    assert events == ["listen 0.5", "added", "listen 0.25", "added", "listen 0.0", "step"]


def test_a_command_that_breaks_the_executor_ends_the_engine_though_the_step_under_way_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is read after the command: that step may never end, since the other hosts start again."""
    rig = Rig(depth=1)
    messages = [add("last", prompt(3), max_tokens=1), Command(1, "start_profile")]
    answers: list[object] = []

    class Socket:
        def receive(self, timeout_s: float) -> list[tuple[bytes, object]]:
            return [(b"client", messages.pop(0))]

        def claim(self, request_id: RequestId, client: bytes) -> None:
            pass

        def send(self, client: bytes, message: object) -> list[RequestId]:
            answers.append(message)
            return []

        def publish(self, step: StepOutputs) -> list[RequestId]:
            answers.append(step)
            return []

    def fail() -> None:
        raise BrokenExecutorError("host 1 is gone")

    monkeypatch.setattr(rig.core._profiler, "start", fail)
    loop = EngineLoop(rig.core, Socket(), rig.executor.model_info, lambda: 0.0)  # type: ignore[arg-type]
    loop.turn()
    assert not answers, "the only step is under way"
    loop.turn()
    assert answers == [CommandDone(1, BROKEN_ERROR, EngineState())]
    assert rig.core.is_broken


@pytest.mark.parametrize(
    "message",
    [Hello(), add("new", prompt(3)), ProtocolError("damaged", RequestId("new"))],
    ids=lambda m: type(m).__name__,
)
def test_requests_of_a_client_are_aborted_if_any_reply_to_it_finds_it_gone(message: object) -> None:
    """The socket reports its requests once only, to the call that notices."""
    handled: list[object] = []

    class Core:
        has_work, is_broken = True, False
        control = SimpleNamespace(adapters=None)
        page_changes = None

        def patience_s(self) -> float:
            return 1.0

        def handle(self, message: object) -> list[RequestOutput]:
            handled.append(message)
            return [rejected(RequestId("new"), BROKEN_ERROR)]

    class Socket:
        def receive(self, timeout_s: float) -> list[tuple[bytes, object]]:
            return [(b"client", message)]

        def send(self, client: bytes, message: object) -> list[RequestId]:
            return [RequestId("old")]

    EngineLoop(Core(), Socket(), Rig().executor.model_info, lambda: 0.0).turn()  # type: ignore[arg-type]
    assert handled[-1:] == [Abort([RequestId("old")])]


async def test_pages_of_a_request_are_published_before_it_ends_and_to_later_clients(tmp_path: Path) -> None:
    engine = Engine(tmp_path, publishes_pages=True)
    first, second = ClientSocket(engine.address), ClientSocket(engine.address)
    try:
        await first.send(Hello())
        assert [await first.receive() for _ in range(2)] == [Ready(engine.rig.executor.model_info), PagesChanged([])]
        message = add("r", prompt(9), max_tokens=4)
        await first.send(message)
        added: list[bytes] = []
        while True:
            received = await first.receive()
            if isinstance(received, PagesChanged):
                assert received.removed == []
                added += received.added
            if isinstance(received, StepOutputs) and received.outputs and received.outputs[0].finish_reason is not None:
                break
        tokens = np.array([*prompt(9), *expected(message)], np.int32)
        assert added == [*page_hashes(tokens, block_size=4)], "12 of the 13 tokens have KV: 3 pages of 4"
        await second.send(Hello())
        assert await second.receive() == Ready(engine.rig.executor.model_info)
        assert await second.receive() == PagesChanged(added)
    finally:
        first.close()
        second.close()
        engine.stop()
