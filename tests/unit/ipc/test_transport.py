"""Both ends of the wire on a real Unix socket."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from jaxserve.errors import ConfigError
from jaxserve.ipc import address as address_module
from jaxserve.ipc import transport
from jaxserve.ipc.address import discard_address, folder_of, incarnation_address, new_address, own_address, private_path
from jaxserve.ipc.messages import (
    Abort,
    AddRequest,
    Heartbeat,
    Hello,
    RequestOutput,
    StepOutputs,
    ToEngine,
)
from jaxserve.ipc.stats import EngineStats
from jaxserve.ipc.transport import QUIET_S, ClientId, ClientSocket, EngineSocket, ProtocolError
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import RequestId

WAIT_S = 60.0
STATS = EngineStats()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return new_address(str(tmp_path))


@pytest.fixture
def engine(address: str) -> Iterator[EngineSocket]:
    socket = EngineSocket(address)
    yield socket
    socket.close()


def expect(engine: EngineSocket, count: int = 1) -> list[tuple[ClientId, ToEngine | ProtocolError]]:
    arrivals: list[tuple[ClientId, ToEngine | ProtocolError]] = []
    while len(arrivals) < count:
        found = engine.receive(WAIT_S)
        assert found, "nothing arrived"
        arrivals += found
    return arrivals


async def test_messages_cross_in_order_in_both_directions(engine: EngineSocket, address: str) -> None:
    connection = ClientSocket(address)
    sent: list[ToEngine] = [Hello(), AddRequest(RequestId("a"), [1], EngineSamplingParams()), Abort([RequestId("a")])]
    for message in sent:
        await connection.send(message)
    arrivals = expect(engine, 3)
    assert msgspec.json.encode([message for _, message in arrivals]) == msgspec.json.encode(sent)
    engine.send(arrivals[0][0], Heartbeat(STATS))
    assert await connection.receive() == Heartbeat(STATS)
    connection.close()


async def test_message_sent_before_the_engine_listens_arrives(address: str) -> None:
    connection = ClientSocket(address)
    await connection.send(Hello())
    engine = EngineSocket(address)
    assert expect(engine)[0][1] == Hello()
    engine.close()
    connection.close()


async def test_message_to_a_dead_engine_does_not_reach_the_next_one(address: str) -> None:
    late = ClientSocket(address)
    await late.send(Hello())
    first = EngineSocket(address)
    expect(first)
    first.close()
    await late.send(AddRequest(RequestId("stale"), [1], EngineSamplingParams()))
    next_address = incarnation_address(address, 1)
    second, connection = EngineSocket(next_address), ClientSocket(next_address)
    await connection.send(Hello())
    assert [message for _, message in expect(second)] == [Hello()]
    again = EngineSocket(address)  # as it would be at the address of the first: by now it has been delivered
    stale = expect(again)[0][1]
    assert isinstance(stale, AddRequest) and stale.request_id == "stale"
    assert second.receive(0) == []
    for end in (late, connection, second, again):
        end.close()


def test_every_incarnation_of_an_engine_has_its_own_address(address: str) -> None:
    addresses = [incarnation_address(address, number) for number in range(1000)]
    assert addresses[0] == address and len(set(addresses)) == 1000
    assert {folder_of(other) for other in addresses} == {folder_of(address)}
    assert incarnation_address(address, 1001) == addresses[1]


async def test_each_client_gets_the_outputs_of_its_requests(engine: EngineSocket, address: str) -> None:
    first, second = ClientSocket(address), ClientSocket(address)
    ids = [RequestId("a"), RequestId("b")]
    for connection, request_id in zip((first, second), ids, strict=True):
        await connection.send(AddRequest(request_id, [1], EngineSamplingParams()))
        client, message = expect(engine)[0]
        assert isinstance(message, AddRequest)
        engine.claim(message.request_id, client)
    outputs = [RequestOutput(request_id, [5], finish_reason="stop") for request_id in ids]
    assert engine.publish(StepOutputs(outputs, STATS)) == []
    assert await first.receive() == StepOutputs([outputs[0]], STATS)
    assert await second.receive() == StepOutputs([outputs[1]], None)  # counters go to one client only
    assert [engine.owner(request_id) for request_id in ids] == [None, None]
    first.close()
    second.close()


async def test_experts_that_fill_more_than_a_frame_are_sent_in_several(
    engine: EngineSocket, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)
    connection = ClientSocket(address)
    await connection.send(Hello())
    client, _ = expect(engine)[0]
    outputs = [RequestOutput(RequestId(str(i)), [i], routed_experts=bytes([i]) * 300) for i in range(3)]
    outputs.insert(1, RequestOutput(RequestId("plain"), [9]))
    for output in outputs:
        engine.claim(output.request_id, client)
    assert engine.publish(StepOutputs(outputs, STATS)) == []
    frames = [await connection.receive() for _ in range(3)]
    assert frames == [StepOutputs(outputs[:2], STATS), StepOutputs(outputs[2:3]), StepOutputs(outputs[3:])]
    connection.close()


async def test_requests_of_a_lost_client_are_reported_once(engine: EngineSocket, address: str) -> None:
    connection = ClientSocket(address)
    await connection.send(Hello())
    client, _ = expect(engine)[0]
    engine.claim(RequestId("a"), client)
    engine.claim(RequestId("b"), client)
    connection.close()
    lost: list[RequestId] = []
    while not lost:  # until the socket has noticed
        lost = engine.publish(StepOutputs([RequestOutput(RequestId("a"), [1])], STATS))
    assert sorted(lost) == ["a", "b"]
    assert engine.broadcast(Heartbeat(STATS)) == []


def test_foreign_frames_arrive_as_errors_and_the_next_message_gets_through(engine: EngineSocket, address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(address)
        raw.send(b"\xc1\xc1")
        raw.send_multipart([b"a", b"b", b"c"])
        raw.send(b"\x91\xa5Hello")
        kinds = [type(message) for _, message in expect(engine, 3)]
        raw.close(linger=0)
    assert kinds == [ProtocolError, ProtocolError, Hello]


def test_receive_returns_early_when_the_descriptor_wakes_it(engine: EngineSocket) -> None:
    reader, writer = os.pipe()
    engine.wake_on(reader)
    os.write(writer, b"x")
    assert engine.receive(WAIT_S * 10) == []
    os.close(reader)
    os.close(writer)


def test_socket_is_private(engine: EngineSocket, address: str) -> None:
    path = private_path(address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_directory_that_others_may_enter_is_rejected(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(ConfigError, match="ours alone"):
        EngineSocket(f"ipc://{shared}/engine.sock")


def test_path_too_long_for_a_unix_socket_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        private_path(f"ipc://{tmp_path}/{'x' * 100}/engine.sock")
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    with pytest.raises(ConfigError, match="107 bytes: shorten --uds-dir"):
        new_address(str(directory))
    assert list(directory.iterdir()) == []


def test_address_that_is_no_unix_socket_is_rejected() -> None:
    with pytest.raises(ConfigError, match="ipc://"):
        private_path("tcp://0.0.0.0:5555")


def test_missing_directory_for_addresses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        new_address(str(tmp_path / "absent"))


def test_error_without_a_temporary_directory_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory is missing in a container with a read-only root."""
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(ConfigError, match=r"IPC socket: No usable temporary directory found in .* \(--uds-dir\)$"):
        new_address()


def test_discarded_address_leaves_no_file(address: str) -> None:
    path = private_path(address)
    path.touch()
    discard_address(address)
    assert not path.parent.exists()
    discard_address(address)


def test_a_start_removes_what_killed_servers_left_and_nothing_else(tmp_path: Path) -> None:
    left = private_path(new_address(str(tmp_path)))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
    left.with_name("api-1.counts").touch()  # written for each answer about metrics
    own_file = private_path(new_address(str(tmp_path))).with_name("notes.txt")
    own_file.touch()
    (tmp_path / "other").mkdir()
    with own_address(str(tmp_path)) as living:
        with own_address(str(tmp_path)) as second:
            assert not left.parent.exists()
            assert own_file.exists()
            assert folder_of(living).exists()
        assert not folder_of(second).exists()
        assert folder_of(living).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["other", own_file.parent.name])


def test_an_address_taken_for_abandoned_before_its_lock_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def swept_once(directory: str | None) -> str:
        made.append(new_address(directory))
        if len(made) == 1:
            discard_address(made[0])
        return made[-1]

    monkeypatch.setattr(address_module, "new_address", swept_once)
    with own_address(str(tmp_path)) as address:
        assert made == [made[0], address]


def test_an_address_is_given_where_directories_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with own_address(str(tmp_path)) as first, own_address(str(tmp_path)):
        assert folder_of(first).exists()
    assert list(tmp_path.iterdir()) == []


async def test_counters_of_a_heartbeat_go_to_one_client_only(engine: EngineSocket, address: str) -> None:
    first, second = ClientSocket(address), ClientSocket(address)
    for connection in (first, second):
        await connection.send(Hello())
        expect(engine)
    assert engine.broadcast(Heartbeat(STATS)) == []
    assert await first.receive() == Heartbeat(STATS)
    assert await second.receive() == Heartbeat(None)
    first.close()
    second.close()


async def test_client_with_waiting_requests_gets_signs_of_life(address: str) -> None:
    now = 0.0
    engine = EngineSocket(address, clock=lambda: now)
    busy, waiting = ClientSocket(address), ClientSocket(address)
    for connection in (busy, waiting):
        await connection.send(Hello())
        client, _ = expect(engine)[0]
        if connection is busy:
            engine.claim(RequestId("a"), client)
    step = StepOutputs([RequestOutput(RequestId("a"), [5])])
    for seconds in (0.5, QUIET_S + 0.1, QUIET_S + 0.2):
        now = seconds
        engine.publish(step)
    engine.broadcast(Heartbeat())
    assert [await busy.receive() for _ in range(4)] == [step, step, step, Heartbeat()]
    assert [await waiting.receive() for _ in range(2)] == [StepOutputs([]), Heartbeat()]
    engine.close()
    busy.close()
    waiting.close()
