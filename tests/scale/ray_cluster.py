"""A real Ray cluster of several nodes, each in a network namespace, and the process that deploys an application on it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.e2e.http_server import ROOT, SOURCES, until
from tests.scale.network import Host, hosts

OBJECT_STORE_BYTES: Final = 100 << 20
GCS_PORT: Final = 6379
HTTP_PORT: Final = 8000
START_TIMEOUT_S: Final = 400.0
RAY = str(Path(sys.executable).with_name("ray"))
AGENT_PORTS: Final = {
    "dashboard-agent-grpc-port": 40001,
    "dashboard-agent-listen-port": 40002,
    "metrics-export-port": 40003,
    "runtime-env-agent-port": 40004,
}
"""Ports of the agents of each node. A raylet waits 15 s for the ports that its agents choose themselves, and then aborts."""
VARIABLES: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a token file of this user would enable it for some of the processes
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_agent_register_timeout_ms": "120000",  # 15 s by default: agents import for longer on a busy machine
    "RAY_raylet_start_wait_time_s": "400",
    "RAY_worker_niceness": "0",  # 15 by default: engines get what all other processes of the machine leave
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",  # 5 s by default: then Ray Serve kills the proxy that a busy machine starts
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PYTHONPATH": SOURCES,
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
}
API_KEY: Final = "key-of-the-nodes"
OF_NODES: Final = VARIABLES | {"JAXSERVE_HOST": "0.0.0.0", "JAXSERVE_PORT": str(HTTP_PORT), "JAXSERVE_API_KEY": API_KEY}
"""The variables of the nodes: an image sets the address, which the servers of replicas must not take, and a secret the key."""


@dataclass
class Cluster:
    """The nodes, head first, and their Ray processes."""

    hosts: list[Host]
    nodes: list[subprocess.Popen[bytes]]
    folder: Path

    @contextlib.contextmanager
    def deployed(self, fake: dict[str, Any] | None, **arguments: Any) -> Iterator[App]:
        """Deploy the application and wait until it answers; removed at the end. fake: None for real engines."""
        head = self.hosts[0]
        log = self.folder / "deploy.log"
        words = [sys.executable, "-m", "tests.scale.ray_driver", json.dumps(arguments), json.dumps(fake)]
        environment = os.environ | VARIABLES | {"RAY_ADDRESS": f"{head.address}:{GCS_PORT}"}
        with log.open("ab") as output:
            driver = subprocess.Popen(
                head.command(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                cwd=ROOT,
            )
        assert driver.stdin is not None and driver.stdout is not None
        try:
            app = App(head.address, HTTP_PORT, driver)
            app.await_deployment()
            yield app
        except BaseException as error:
            error.add_note(log.read_text()[-6000:])
            raise
        finally:
            driver.stdin.close()
            driver.wait(120)
            driver.stdout.close()


@dataclass(frozen=True)
class App:
    """The address of the application, and the process that deploys it."""

    host: str
    port: int
    driver: subprocess.Popen[bytes]

    def update(self, **arguments: Any) -> None:
        """Deploy the application again with changed arguments; returns when the new one has taken over."""
        assert self.driver.stdin is not None
        self.driver.stdin.write(json.dumps(arguments).encode() + b"\n")
        self.driver.stdin.flush()
        self.await_deployment()

    def await_deployment(self) -> None:
        """Wait for the end of a deployment; other lines are what the actors print."""
        assert self.driver.stdout is not None
        assert b"deployed\n" in self.driver.stdout, "the deployment failed"


@contextlib.contextmanager
def cluster(
    num_nodes: int,
    cpus_per_node: int,
    own_words: Sequence[Sequence[str]] = (),
    variables: Callable[[Host], Mapping[str, str]] = lambda host: {},
) -> Iterator[Cluster]:
    """Start a cluster and stop it at the end, with every process on its hosts.

    own_words: arguments of each node. variables: further ones of each node.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jsr-", ignore_cleanup_errors=True)))
        made = stack.enter_context(hosts(num_nodes))
        running = Cluster(made, [], folder)
        stack.callback(_stop_all, running)
        for index, host in enumerate(made):
            own = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
            role = own if index == 0 else [f"--address={made[0].address}:{GCS_PORT}"]
            words = [RAY, "start", *role, f"--node-ip-address={host.address}", f"--num-cpus={cpus_per_node}"]
            words += [f"--{name}={port}" for name, port in AGENT_PORTS.items()]
            words += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats", "--block"]
            words += own_words[index] if own_words else []
            log = folder / f"node-{index}.log"
            with log.open("wb") as output:
                environment = os.environ | OF_NODES | dict(variables(host))
                node = subprocess.Popen(host.command(*words), stdout=output, stderr=output, env=environment, cwd=ROOT)
            running.nodes.append(node)
            until(
                lambda node=node, log=log: node.poll() is not None or b"Ray runtime started" in log.read_bytes(),
                "the node did not start",
                START_TIMEOUT_S,
            )
            assert node.poll() is None, log.read_text()[-4000:]
        yield running


def drain_node(running: Cluster, index: int) -> None:
    """Ask Ray to move everything off a node, as before the machine is taken away."""
    head = running.hosts[0]
    address = f"{head.address}:{GCS_PORT}"
    listing = "import ray, sys; ray.init(address=sys.argv[1], logging_level=40); nodes = ray.nodes(); "
    listing += "print([node['NodeID'] for node in nodes if node['NodeManagerAddress'] == sys.argv[2]][0])"
    environment = os.environ | VARIABLES
    words = head.command(sys.executable, "-c", listing, address, running.hosts[index].address)
    node = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout.split()[-1]
    words = [RAY, "drain-node", f"--address={address}", f"--node-id={node}", "--reason-message=maintenance"]
    words += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds=600"]
    subprocess.run(head.command(*words), check=True, env=environment, capture_output=True)


def processes_on(host: Host) -> list[int]:
    """Return all processes of a host."""
    done = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def _stop_all(running: Cluster) -> None:
    for node in running.nodes:
        node.terminate()
    for node in running.nodes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(20)
    for host in running.hosts:
        for pid in processes_on(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    for node in running.nodes:
        node.wait(20)
