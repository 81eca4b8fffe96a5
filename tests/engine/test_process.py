"""Real engine processes with the fake executor: start, work, and every way to end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from jaxserve.config import CacheConfig, Config, ModelConfig, RecorderConfig, SchedulerConfig, ServerConfig
from jaxserve.engine.core import STOP_ERROR
from jaxserve.errors import ConfigError
from jaxserve.executor.fake.models import next_token
from jaxserve.flight.record import SUFFIX, FlightRecord, read_record
from jaxserve.flight.replay import replay
from jaxserve.ipc.address import new_address, private_path
from jaxserve.ipc.engine_spec import EngineSpec, FakeOptions
from jaxserve.ipc.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Hello,
    Ready,
    RequestOutput,
    StartupFailed,
    StepOutputs,
)
from jaxserve.ipc.transport import ClientSocket
from jaxserve.runtime.engine_process import EngineProcess
from jaxserve.runtime.spawn import spawn
from jaxserve.types import RequestId
from tests.engine.rig import add, prompt
from tests.processes import freeze

ENDLESS = 60_000
FAKE = FakeOptions(vocab_size=997, num_blocks=4097, max_model_len=ENDLESS + 100)


class Client:
    """An engine process, and a connection to it."""

    def __init__(self, directory: Path, fake: FakeOptions) -> None:
        self.spec = EngineSpec(
            config=Config(
                model=ModelConfig(model="fake"),
                cache=CacheConfig(block_size=16),
                scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
                server=ServerConfig(api_key="secret"),
            ),
            model_path="/nowhere",
            address=new_address(str(directory)),
            executor="fake",
            fake=fake,
        )
        self.connection = ClientSocket(self.spec.address)
        self.started: EngineProcess | None = None

    @property
    def process(self) -> EngineProcess:
        assert self.started is not None
        return self.started

    async def start(self) -> list[FromEngine]:
        """Spawn, greet, and collect what comes up to readiness or failure."""
        self.started = await EngineProcess.start(self.spec)
        await self.connection.send(Hello())
        messages = [await self.connection.receive()]
        while not isinstance(messages[-1], Ready | StartupFailed):
            messages.append(await self.connection.receive())
        return messages

    async def output(self) -> RequestOutput:
        while True:
            message = await self.connection.receive()
            if isinstance(message, StepOutputs) and message.outputs:
                return message.outputs[0]

    async def end(self) -> RequestOutput:
        while (output := await self.output()).finish_reason is None:
            pass
        return output


@asynccontextmanager
async def client_with(directory: Path, fake: FakeOptions) -> AsyncIterator[Client]:
    client = Client(directory, fake)
    try:
        yield client
    finally:
        client.connection.close()
        if client.started is not None:
            client.started.kill()
            await client.started.wait()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with client_with(tmp_path, FAKE) as client:
        yield client


async def test_engine_becomes_ready_serves_aborts_and_stops_on_sigterm(client: Client) -> None:
    *_, ready = await client.start()
    assert isinstance(ready, Ready)
    assert (ready.model_info.vocab_size, ready.model_info.num_kv_blocks, ready.model_info.block_size) == (997, 4097, 16)

    request = add("r", prompt(50), max_tokens=3)
    await client.connection.send(request)
    tokens = list(request.prompt_token_ids)
    for _ in range(3):
        tokens += (await client.output()).token_ids
        assert tokens[-1] == next_token(tokens[:-1], 997)

    await client.connection.send(add("endless", prompt(5), max_tokens=ENDLESS))
    await client.output()
    await client.connection.send(Abort([RequestId("endless")]))
    assert (await client.end()).finish_reason == "abort"

    os.kill(client.process.pid, signal.SIGINT)  # not ours to act on
    await client.connection.send(add("last", prompt(5), max_tokens=ENDLESS))
    await client.output()
    assert await client.process.terminate(timeout_s=20) == 0
    assert (await client.end()).error == STOP_ERROR
    assert not private_path(client.spec.address).exists()


@pytest.mark.slow
async def test_idle_engine_sends_heartbeats_and_uses_no_processor(client: Client) -> None:
    await client.start()
    while not isinstance(await client.connection.receive(), Heartbeat):
        pass  # the adapters that are loaded
    before = cpu_seconds(client.process.pid)
    assert isinstance(await client.connection.receive(), Heartbeat)
    assert cpu_seconds(client.process.pid) - before <= 0.02  # two ticks of the kernel's clock in a second


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_engine_dies_with_its_parent(client: Client, tmp_path: Path) -> None:
    """The engine ends if its parent is killed, also in the middle of work."""
    spec = tmp_path / "spec.json"
    spec.write_bytes(client.spec.to_line())
    code = (
        "import asyncio, pathlib, sys\n"
        "from jaxserve.runtime.engine_process import EngineProcess\n"
        "from jaxserve.ipc.engine_spec import EngineSpec\n"
        "async def main():\n"
        "    engine = await EngineProcess.start(EngineSpec.parse(pathlib.Path(sys.argv[1]).read_bytes()))\n"
        "    print(engine.pid, flush=True)\n"
        "    await engine.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(spec), stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    engine = os.pidfd_open(pid)
    await client.connection.send(Hello())
    while not isinstance(await client.connection.receive(), Ready):
        pass
    await client.connection.send(add("endless", prompt(5), max_tokens=ENDLESS))
    await client.output()
    parent.kill()
    await parent.wait()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(engine, gone.set)  # a pidfd is readable when its process has ended
    await asyncio.wait_for(gone.wait(), 60)
    asyncio.get_running_loop().remove_reader(engine)
    os.close(engine)


async def test_engine_whose_stdin_ends_exits_and_tidies_up(client: Client) -> None:
    process = spawn(None)
    client.started = await EngineProcess.start(client.spec, process=process)
    await client.connection.send(Hello())
    while not isinstance(await client.connection.receive(), Ready):
        pass
    assert process.stdin is not None
    process.stdin.close()
    assert await client.started.wait() == 1
    assert not private_path(client.spec.address).exists()


def test_engine_without_a_spec_ends_silently() -> None:
    command = [sys.executable, "-m", "jaxserve.engine.process"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


async def test_failed_start_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    async with client_with(tmp_path, FakeOptions(start_error="model.gguf: tensor x is cut short")) as client:
        messages = await client.start()
        assert messages[-1] == StartupFailed("model.gguf: tensor x is cut short")
        assert await client.process.wait() == 2


async def test_two_failed_steps_in_a_row_end_the_process_with_1(tmp_path: Path) -> None:
    async with client_with(tmp_path, FakeOptions(fail_at_steps=(1, 3))) as client:
        await client.start()
        for name in ("first", "second"):
            await client.connection.send(add(name, prompt(5), max_tokens=9))
            end = await client.end()
            assert end.error is not None
            assert end.error.error_class == "InternalError"
        assert await client.process.wait() == 1


async def test_frozen_engine_is_killed(client: Client) -> None:
    await client.start()
    freeze(client.process.pid)
    assert await client.process.terminate(timeout_s=0.2) == -signal.SIGKILL


async def test_garbage_instead_of_a_spec_is_rejected(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "jaxserve.engine.process",
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate(b"{}\n")
    assert process.returncode == 2
    assert stderr.decode().startswith("engine: a process of the engine got no valid specification")
    assert stderr.count(b"\n") == 1


async def test_spec_survives_the_trip(client: Client) -> None:
    spec = client.spec
    assert spec.to_line().count(b"\n") == 1
    assert EngineSpec.parse(spec.to_line()) == spec


def test_broken_spec_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no valid specification"):
        EngineSpec.parse(b"not json")


def _await_file(folder: Path) -> None:
    """Wait until a record is written."""
    while not any(folder.glob(f"*{SUFFIX}")):
        time.sleep(0.01)


class RecordedClient(Client):
    """An engine that writes its flight records into a folder."""

    def __init__(self, directory: Path, fake: FakeOptions) -> None:
        super().__init__(directory, fake)
        self.records = directory / "flight"
        self.records.mkdir(mode=0o700)
        recorder = RecorderConfig(flight_recorder_dir=str(self.records))
        config = dataclasses.replace(self.spec.config, recorder=recorder)
        self.spec = msgspec.structs.replace(self.spec, config=config)

    async def next_record(self) -> FlightRecord:
        """Wait until the first record is there, and read it."""
        await asyncio.wait_for(asyncio.to_thread(_await_file, self.records), 60)
        return read_record(next(self.records.glob(f"*{SUFFIX}")))


@asynccontextmanager
async def recorded_client(directory: Path, fake: FakeOptions) -> AsyncIterator[RecordedClient]:
    client = RecordedClient(directory, fake)
    try:
        yield client
    finally:
        client.connection.close()
        client.process.kill()
        await client.process.wait()


async def test_an_engine_that_breaks_leaves_its_flight_record(tmp_path: Path) -> None:
    fake = msgspec.structs.replace(FAKE, fail_at_steps=tuple(range(3, 100)))
    async with recorded_client(tmp_path, fake) as client:
        await client.start()
        for number in range(3):
            await client.connection.send(add(f"r{number}", prompt(5, number), max_tokens=50))
        assert await client.process.wait() == 1
        record = await client.next_record()
    assert (record.reason, record.model, record.first_step) == ("crash", "fake", 1)
    assert [call.kind for call in record.calls].count("fail") >= 2
    assert replay(record) is None


async def test_an_engine_that_hangs_in_its_device_writes_its_flight_record_by_signal(tmp_path: Path) -> None:
    async with recorded_client(tmp_path, msgspec.structs.replace(FAKE, device_seconds=3600.0)) as client:
        await client.start()
        await client.connection.send(add("r", prompt(40), max_tokens=50))
        record = None
        while record is None or not record.num_steps:  # the engine may not have got the request yet
            for path in client.records.iterdir():
                path.unlink()
            client.process.ask_for_record()
            record = await client.next_record()
    assert record.reason == "signal"
    assert replay(record) is None
