"""Leader and worker in one process, joined by loopback: what they agree on, the order of plans, and every end."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jax
import pytest
import zmq

from jaxserve.config import CompileConfig, Config, HostsConfig, ModelConfig
from jaxserve.errors import ConfigError, StartupError
from jaxserve.executor.hosts import exchanges, sockets
from jaxserve.executor.hosts import leader as leader_module
from jaxserve.executor.hosts import worker as worker_module
from jaxserve.executor.hosts.agreement import agree_common, agree_equal, agree_kernels, agree_smallest
from jaxserve.executor.hosts.leader import Leader
from jaxserve.executor.hosts.messages import Failed, HostStats, Left, Refused, Restart, Stop, encode
from jaxserve.executor.hosts.plans import HostCommand, encode_order
from jaxserve.executor.hosts.worker import LOST, REFUSED, STOPPED, Worker
from jaxserve.tools.bench.startup import free_port

SETTINGS = {"jaxserve": "1"}
WAIT_S = 60.0


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    """Closes leaders and workers after a test, in the reverse order of their starts."""
    with contextlib.ExitStack() as stack:
        yield stack


def settings(**changes: Any) -> HostsConfig:
    options = {"num_hosts": 2, "host_rank": 0, "coordinator": f"127.0.0.1:{free_port()}", "host_timeout": 20.0}
    return HostsConfig(**(options | changes))


class Joined:
    """A worker, and how it ends."""

    def __init__(
        self, ends: contextlib.ExitStack, config: HostsConfig, shared_settings: dict[str, str] = SETTINGS, rank: int = 1
    ) -> None:
        self.end: Future[tuple[int, str]] = Future()
        self.beats = threading.Semaphore(0)
        self.worker = Worker(
            replace(config, host_rank=rank),
            f"host-{rank}",
            shared_settings,
            on_end=lambda code, reason: self.end.set_result((code, reason)),
            on_beat=self.beats.release,
        )
        ends.callback(self.worker.close)
        ends.callback(self.worker.end, Left())


def leader_of(ends: contextlib.ExitStack, config: HostsConfig) -> Leader:
    leader = Leader(config, SETTINGS)
    ends.callback(leader.close)
    ends.callback(leader.end, Stop())
    return leader


def ignore(done: int, total: int) -> None:
    """Show no progress."""


def pair(ends: contextlib.ExitStack, **changes: Any) -> tuple[Leader, Joined, Future[str]]:
    """Return a leader and a worker that serve, and the reason for which the worker counts as lost."""
    config = settings(**changes)
    leader, joined, lost = leader_of(ends, config), Joined(ends, config), Future[str]()
    leader.gather(ignore)
    joined.worker.gather()
    joined.worker.serve(lambda: HostStats(7, 8))
    leader.serve(lost.set_result)
    return leader, joined, lost


def on_both(leader: Leader, worker: Worker, call: Any) -> tuple[Any, Any]:
    """Return the outcomes of call(hosts) at both ends; errors as they are."""
    outcomes: list[Any] = [None, None]

    def run(index: int, hosts: Any) -> None:
        try:
            outcomes[index] = call(hosts)
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate((leader, worker))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return outcomes[0], outcomes[1]


Ends = contextlib.ExitStack


def test_hosts_agree_on_the_smallest_value_and_common_names(ends: Ends) -> None:
    leader, joined, _ = pair(ends)
    assert on_both(leader, joined.worker, lambda hosts: agree_smallest(hosts, "KV", 10 - hosts.rank)) == (9, 9)
    named = on_both(leader, joined.worker, lambda hosts: agree_common(hosts, "programs", {"a", f"{hosts.rank}"}))
    assert named == ({"a"}, {"a"})


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_kernels_that_fail_on_one_host_are_used_on_none(ends: Ends, bad: int | None) -> None:
    leader, joined, _ = pair(ends)
    configs = [
        Config(
            model=ModelConfig(model="m"),
            compile=CompileConfig(attention_backend="reference" if rank == bad else "auto"),
        )
        for rank in range(2)
    ]
    found = on_both(leader, joined.worker, lambda hosts: agree_kernels(hosts, configs[hosts.rank]))
    assert [config.compile.attention_backend for config in found] == ["auto" if bad is None else "reference"] * 2


def test_both_hosts_refuse_different_settings_with_one_line(ends: Ends) -> None:
    leader, joined, _ = pair(ends)
    errors = on_both(leader, joined.worker, lambda hosts: agree_equal(hosts, "keys", {"cores": f"{2 + hosts.rank}"}))
    assert {str(error) for error in errors} == {"host 1 differs from host 0: cores: 3 there, 2 here"}
    assert {type(error) for error in errors} == {ConfigError}


def test_orders_arrive_in_order_and_the_workers_numbers_come_back(ends: Ends) -> None:
    leader, joined, _ = pair(ends, host_timeout=2.0)
    commands: tuple[HostCommand, ...] = ("start_profile", "stop_profile") * 50
    for name in commands:
        leader.plans.broadcast(encode_order(name))
    assert tuple(joined.worker.next_order() for _ in commands) == commands
    assert leader.plans.num_bytes == sum(len(encode_order(name)) for name in commands)
    while leader.members.stats[1] != HostStats(7, 8):
        assert joined.beats.acquire(timeout=WAIT_S)


def test_a_stopped_server_ends_its_workers_with_code_0(ends: Ends) -> None:
    leader, joined, lost = pair(ends)
    leader.end(Stop())
    assert joined.end.result(WAIT_S)[0] == STOPPED
    assert not lost.done()


def test_an_engine_that_is_started_again_ends_its_workers_with_code_1(ends: Ends) -> None:
    leader, joined, lost = pair(ends)
    leader.end(Restart("a step failed"))
    assert joined.end.result(WAIT_S) == (LOST, "a step failed")
    assert not lost.done()


@pytest.mark.parametrize(("last", "reason"), [(Failed("no memory"), ": no memory"), (Left(), " was stopped")])
def test_a_worker_that_ends_while_the_engine_serves_is_lost(ends: Ends, last: Failed | Left, reason: str) -> None:
    _, joined, lost = pair(ends)
    joined.worker.end(last)
    found = lost.result(WAIT_S)
    assert found.startswith("host 1 (") and found.endswith(f"){reason}")


def test_a_worker_with_other_settings_is_refused_and_the_start_ends(ends: Ends) -> None:
    config = settings()
    leader, joined = leader_of(ends, config), Joined(ends, config, {"jaxserve": "2"})
    with pytest.raises(ConfigError, match="differs from host 0: jaxserve: 2 there, 1 here"):
        leader.gather(ignore)
    code, reason = joined.end.result(WAIT_S)
    assert code == REFUSED and "differs from host 0: jaxserve: 2 there, 1 here" in reason


def test_a_start_ends_on_all_hosts_when_one_of_them_fails(ends: Ends) -> None:
    config = settings(num_hosts=3)
    leader, first, second = leader_of(ends, config), Joined(ends, config), Joined(ends, config, rank=2)
    leader.gather(ignore)
    second.worker.end(Failed("no such file"))
    with pytest.raises(StartupError, match=r"host 2 \(.*\): no such file"):
        leader.exchange("keys", {})
    leader.end(Refused("host 2: no such file"))
    assert first.end.result(WAIT_S) == (REFUSED, "host 2: no such file")


def test_a_start_ends_at_once_if_a_host_fails_while_host_0_is_busy(ends: Ends) -> None:
    """Host 0 reads weights, or is in a collective that the other host never joins."""
    config = settings()
    leader, joined = leader_of(ends, config), Joined(ends, config)
    leader.gather(ignore)
    joined.worker.end(Failed("no such file"))
    assert str(leader.failed.result(WAIT_S)).endswith(": no such file")
    assert not leader.lost.done()


def test_hosts_start_again_after_an_error_that_may_pass(ends: Ends) -> None:
    """A driver's error while the engine starts again, for instance, must not end the supervisors of the other hosts."""
    config = settings(num_hosts=3)
    leader, first, second = leader_of(ends, config), Joined(ends, config), Joined(ends, config, rank=2)
    leader.gather(ignore)
    second.worker.end(Failed("XlaRuntimeError: INTERNAL", is_final=False))
    code, reason = first.end.result(WAIT_S)
    assert code == LOST and reason.endswith(": XlaRuntimeError: INTERNAL")
    assert str(leader.failed.result(WAIT_S)).endswith(": XlaRuntimeError: INTERNAL while the engine started")


def test_a_worker_that_ends_before_it_reads_plans_ends_the_start(ends: Ends) -> None:
    config = settings()
    leader, joined = leader_of(ends, config), Joined(ends, config)
    leader.gather(ignore)
    joined.worker.end(Left())
    with pytest.raises(StartupError, match="was stopped while the engine started"):
        leader.serve(ends.close)


def test_a_worker_that_cannot_reach_the_port_of_plans_is_named(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "START_TIMEOUT_S", 0.1)
    config = settings()
    leader, _ = leader_of(ends, config), Joined(ends, config)
    leader.gather(ignore)
    with pytest.raises(
        StartupError, match=r"host 1 \(.*\) cannot reach tcp://.*127\.0\.0\.1.*: all ports must be open"
    ):
        leader.serve(ends.close)


def test_the_error_of_a_worker_that_cannot_reach_the_program_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`jax.distributed` would end the process."""
    monkeypatch.setattr(sockets, "START_TIMEOUT_S", 0.1)
    with pytest.raises(StartupError, match=r"host 0 cannot be reached at 127\.0\.0\.1:\d+: Connection refused"):
        sockets.join_program(settings(host_rank=1), f"127.0.0.1:{free_port()}")


def test_the_programs_own_signs_of_life_may_be_late_while_hosts_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It aborts the processes of all hosts without a line of ours, and `--host-timeout` is for engines that serve."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    for timeout_s, expected in ((2.0, 120), (100.0, 200)):
        sockets.join_program(settings(host_timeout=timeout_s), "127.0.0.1:1")
        assert given["heartbeat_timeout_seconds"] == expected


@pytest.mark.parametrize("frames", [(b"", b"a", b"request"), (encode(Left()).replace(b"Left", b"\xffeft"),)])
def test_messages_of_other_programs_are_ignored(
    frames: tuple[bytes, ...], ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: Future[str] = Future()
    monkeypatch.setattr(leader_module._LOG, "error", lambda text, *_: ignored.set_result(text))
    config = settings()
    leader, joined = leader_of(ends, config), Joined(ends, config)
    leader.gather(ignore)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{config.coordinator}")
        stranger.send_multipart(frames)
        assert ignored.result(WAIT_S).startswith("ignored a message")
    assert on_both(leader, joined.worker, lambda hosts: agree_smallest(hosts, "KV", 10 - hosts.rank)) == (9, 9)


def test_the_log_names_a_host_that_is_waited_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "SHOW_S", 0.01)
    shown: Future[str] = Future()
    monkeypatch.setattr(exchanges._LOG, "warning", lambda text, *args: shown.done() or shown.set_result(text % args))
    leader, joined, _ = pair(ends)
    thread = threading.Thread(target=leader.exchange, args=("programs", {}))
    thread.start()
    assert re.fullmatch("waiting for host 1 since 0 s: programs", shown.result(WAIT_S))
    joined.worker.exchange("programs", {})
    thread.join(WAIT_S)


def test_a_start_without_all_hosts_names_those_that_are_missing(ends: Ends) -> None:
    leader = leader_of(ends, settings(num_hosts=3, host_join_timeout=1.0))
    with pytest.raises(StartupError, match=r"host 1, host 2 did not join within 1 s \(--host-join-timeout\)"):
        leader.gather(ignore)


def test_a_worker_says_that_host_0_waits_for_others(ends: Ends) -> None:
    config = settings(num_hosts=3, host_timeout=0.5, host_join_timeout=WAIT_S)
    leader_of(ends, config)
    joined = Joined(ends, replace(config, host_join_timeout=2.0))
    with pytest.raises(StartupError, match=r"no start within 2 s .*: host 0 waits for other hosts"):
        joined.worker.gather()


def test_a_worker_says_that_host_0_cannot_be_reached_while_it_waits_and_at_the_end(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "SHOW_S", 0.01)
    shown: list[str] = []
    monkeypatch.setattr(worker_module._LOG, "warning", lambda text, *args: shown.append(text % args))
    config = settings(host_join_timeout=1.0)
    with pytest.raises(
        StartupError, match=r"\(--host-join-timeout\): host 0 does not listen there.*: Connection refused"
    ):
        Joined(ends, config).worker.gather()
    line = f"--coordinator {config.coordinator}: waiting since 0 s: host 0 does not listen there, or cannot be reached"
    assert shown[0] == f"{line}: Connection refused"


def test_a_worker_says_that_another_process_has_the_port_of_host_0(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        config = settings(coordinator=f"127.0.0.1:{stranger.getsockname()[1]}", host_join_timeout=1.0)
        with pytest.raises(StartupError, match="the process that listens there does not answer: it is not host 0, or"):
            Joined(ends, config).worker.gather()


def test_host_0_names_the_hosts_that_it_waits_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "SHOW_S", 0.0)
    shown: list[str] = []
    monkeypatch.setattr(leader_module._LOG, "warning", lambda text, *args: shown.append(text % args))
    leader = leader_of(ends, settings(num_hosts=3, host_join_timeout=1.0))
    with pytest.raises(StartupError):
        leader.gather(ignore)
    assert shown[0] == "waiting for host 1, host 2 since 0 s"


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--coordinator 192\.0\.2\.1:7600: cannot listen on 192\.0\.2\.1 port 7600"):
        Leader(settings(coordinator="192.0.2.1:7600"), SETTINGS)
