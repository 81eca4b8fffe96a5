"""Workers that freeze, are cut off, differ or are stopped: one error for each request, and the engine comes back."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.tools.bench.startup import free_port
from tests.e2e.hosts import (
    END_TIMEOUT_S,
    START_TIMEOUT_S,
    HostChange,
    Replica,
    golden_tokens,
    greedy_body,
    greedy_tokens,
    host_command,
    running_hosts,
)
from tests.e2e.http_server import SOURCES, Server, await_ready, launched, until
from tests.e2e.real_server import model
from tests.e2e.test_http_raw import open_post, read_until
from tests.processes import freeze
from tests.programs import shared_programs
from tests.scale.cable import TwoHosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.scale]

NUM_TOKENS = 16
QUICK = ("--host-timeout", "2")


@pytest.fixture(scope="session")
def programs() -> Path:
    return shared_programs()


@contextlib.contextmanager
def streams_that_end_with_one_error(server: Server) -> Iterator[None]:
    """Two requests run while the block does harm; each ends with one error, and the server stays healthy."""
    streams = [open_post(server, greedy_body(model(), 470, stream=True)) for _ in range(2)]
    for stream in streams:
        read_until(stream, b'"text"')
    yield
    for stream in streams:
        assert read_until(stream, b"data: [DONE]\n\n").count(b'data: {"error":') == 1
        stream.close()
    assert server.request("GET", "/live")[0] == 200, "the server lives, and starts the engine again"


def test_a_frozen_worker_is_replaced(programs: Path) -> None:
    with running_hosts(model(), 2, 2, *QUICK, programs=programs) as replica:
        expected = greedy_tokens(replica.server, model(), NUM_TOKENS)
        frozen = replica.worker_pid(1)
        with streams_that_end_with_one_error(replica.server):
            freeze(frozen)
        replica.await_back()
        assert "host 1" in replica.server.output and "has been silent for 2 s" in replica.server.output
        assert replica.worker_pid(1) != frozen
        assert greedy_tokens(replica.server, model(), NUM_TOKENS) == expected
        assert replica.stop() == [0, 0]


def test_a_worker_that_is_asked_to_stop_waits_for_the_server_and_a_second_signal_ends_it(programs: Path) -> None:
    with running_hosts(model(), 2, 2, *QUICK, programs=programs) as replica:
        supervisor = replica.hosts[0].process
        supervisor.terminate()
        until(lambda: "waiting for host 0 to stop" in replica.hosts[0].output, "the signal had no effect")
        assert len(greedy_tokens(replica.server, model(), NUM_TOKENS)) == NUM_TOKENS
        supervisor.send_signal(signal.SIGINT)
        assert supervisor.wait(END_TIMEOUT_S) == 0
        until(lambda: "the engine ends on all hosts" in replica.server.output, "the loss was not noticed")
        assert replica.server.stop() == 0


def test_a_server_that_is_stopped_while_it_starts_stops_the_hosts_that_have_joined(programs: Path) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    cache = ("--compile-cache", str(programs / "host-0"))
    commands = [
        host_command(model().path, 0, 3, 3, coordinator, "--port", "0", *cache),
        host_command(model().path, 1, 3, 3, coordinator, *cache),
    ]
    with contextlib.ExitStack() as stack:
        server, worker = [stack.enter_context(launched(command)) for command in commands]
        until(lambda: "waiting for host 2" in server.output, "host 1 has not joined", START_TIMEOUT_S)
        assert server.stop() == 0
        assert worker.process.wait(END_TIMEOUT_S) == 0, "host 2 never comes, and neither does another host 0"
        worker.reader.join(END_TIMEOUT_S)
        assert "the server has stopped" in worker.output and "starting it again" not in worker.output


def test_hosts_that_differ_are_refused_with_one_line_on_each(programs: Path) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    cache = ("--compile-cache", str(programs / "host-0"))
    commands = [
        host_command(model().path, 0, 2, 2, coordinator, "--port", "0", *cache),
        host_command(model().path, 1, 2, 2, coordinator, "--block-size", "8", *cache),
    ]
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(launched(command)) for command in commands]
        assert [host.process.wait(START_TIMEOUT_S) for host in hosts] == [2, 2]
        for host in hosts:
            host.reader.join(END_TIMEOUT_S)
            assert host.output.count("differs from host 0: --block-size: 8 there") == 1
            assert "Traceback" not in host.output


def test_hosts_with_other_weights_of_the_same_shapes_are_refused(programs: Path, tmp_path: Path) -> None:
    """Two revisions of a model have them, when the cache of each host holds another one."""
    golden, coordinator = model(), f"127.0.0.1:{free_port()}"
    paths = [shutil.copytree(golden.path, tmp_path / f"host-{rank}") for rank in range(2)]
    weights = paths[1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    cache = ("--compile-cache", str(programs / "host-0"))
    commands = [
        host_command(paths[0], 0, 2, 2, coordinator, "--port", "0", *cache),
        host_command(paths[1], 1, 2, 2, coordinator, *cache),
    ]
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(launched(command)) for command in commands]
        assert [host.process.wait(START_TIMEOUT_S) for host in hosts] == [2, 2]
        for host in hosts:
            host.reader.join(END_TIMEOUT_S)
            assert host.output.count("host 1 differs from host 0: samples of the weights: ") == 1
            assert "Traceback" not in host.output


def startup_code(folder: Path, code: str) -> Path:
    """Write code that every Python of a host runs when it starts; returns the folder for its path."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code, encoding="utf-8")
    return folder


def test_a_host_of_another_version_is_refused_with_one_line_on_each(programs: Path, tmp_path: Path) -> None:
    other = startup_code(tmp_path / "startup", "import jaxserve\njaxserve.__version__ = '0.0.9'\n")
    coordinator = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(launched(command, python_path=path))
            for command, path in [
                (host_command(model().path, 0, 2, 2, coordinator, "--port", "0"), SOURCES),
                (host_command(model().path, 1, 2, 2, coordinator), f"{other}:{SOURCES}"),
            ]
        ]
        assert [host.process.wait(START_TIMEOUT_S) for host in hosts] == [2, 2]
        for host in hosts:
            host.reader.join(END_TIMEOUT_S)
            assert host.output.count(f"differs from host 0: jaxserve: 0.0.9 there, {__version__} here") == 1
            assert "Traceback" not in host.output


def test_a_host_may_have_another_clock_and_other_folders(programs: Path, tmp_path: Path) -> None:
    """Its wall clock is a day ahead, its model lies elsewhere under another name, and it has no compiled programs."""
    code = "import time\nreal = time.time\ntime.time = lambda: real() + 86400\n"
    copied = shutil.copytree(model().path, tmp_path / "elsewhere")
    change = HostChange(copied, tmp_path / "programs", startup_code(tmp_path / "startup", code))
    with running_hosts(model(), 2, 2, *QUICK, programs=programs, changes={1: change}) as replica:
        assert greedy_tokens(replica.server, model(), NUM_TOKENS) == golden_tokens(model(), NUM_TOKENS)
        assert list((tmp_path / "programs").iterdir()), "this host has stored the programs that it compiled"
        tomorrow = f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%d}"
        assert tomorrow in replica.hosts[0].output, "times of its log"
        assert replica.stop() == [0, 0]


def test_a_worker_that_loses_its_network_ends_each_request_once_and_joins_again(programs: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(two_hosts())
        replica = stack.enter_context(cut_off_replica(network, programs, tmp_path))
        expected = greedy_tokens(replica.server, model(), NUM_TOKENS)
        with streams_that_end_with_one_error(replica.server):
            network.cut()
        until(lambda: "host 0 has been silent" in replica.hosts[0].output, "the worker did not notice", END_TIMEOUT_S)
        network.mend()
        replica.await_back()
        assert greedy_tokens(replica.server, model(), NUM_TOKENS) == expected
        assert replica.stop() == [0, 0]


@contextlib.contextmanager
def cut_off_replica(network: TwoHosts, programs: Path, sockets: Path) -> Iterator[Replica]:
    """A ready replica with one host in each network namespace."""
    coordinator = f"{network.near}:7600"
    commands = [
        [
            *host_command(model().path, rank, 2, 2, coordinator, *QUICK),
            *("--compile-cache", str(programs / f"host-{rank}")),
            *(("--port", "0", "--uds-dir", str(sockets), "--served-model-name", "tiny") if rank == 0 else ()),
        ]
        for rank in range(2)
    ]
    with launched(commands[0]) as server, launched(network.far_command(commands[1])) as worker:
        await_ready(server, START_TIMEOUT_S)
        yield Replica(server, [worker])
