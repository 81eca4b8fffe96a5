"""An engine over several hosts: a server and its workers as users start them, all on this machine, joined by gloo."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.tokenizer.tokenizer import load_tokenizer
from jaxserve.tools.bench.startup import free_port
from tests.e2e.http_server import ROOT, SOURCES, Server, await_ready, children_of, command_of, launched, until
from tests.models.goldens import GoldenCheckpoint

WORKER = b"jaxserve.engine.host_worker"
START_TIMEOUT_S = 600.0
"""Ends a hanging test; several processes compile the same programs side by side."""
END_TIMEOUT_S = 120.0
JOIN_TIMEOUT_S = "600"
FEW_PROGRAMS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16")


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine: the server on host 0, and the supervisor of each other host."""

    server: Server
    hosts: Sequence[Server]

    def worker_pid(self, host: int) -> int:
        """Return the worker process of a host, from 1."""
        supervisor = self.hosts[host - 1].process.pid
        found = [pid for pid in children_of(supervisor) if WORKER in command_of(pid)]
        assert len(found) == 1, self.hosts[host - 1].output
        return found[0]

    def await_back(self, times: int = 1) -> None:
        """Wait until the engine has been started again so many times."""
        back = "the engine is back after"
        until(lambda: self.server.output.count(back) == times, "the engine never came back", START_TIMEOUT_S)

    def stop(self) -> list[int]:
        """End the server, wait for all hosts, and return the exit codes by rank."""
        return [self.server.stop(), *(host.process.wait(END_TIMEOUT_S) for host in self.hosts)]


@dataclass(frozen=True, slots=True)
class HostChange:
    """Differences between a host and the others."""

    model: Path | None = None
    programs: Path | None = None
    startup: Path = ROOT
    """A folder with a `sitecustomize.py`, which every Python of the host runs when it starts."""


def host_command(model: Path, rank: int, num_hosts: int, num_devices: int, coordinator: str, *flags: str) -> list[str]:
    """Return the command of one host."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(model), *FEW_PROGRAMS, "--cpu-kernels", "xla"]
    command += ["--kv-cache-memory", "8MiB", "--num-hosts", str(num_hosts), "--host-rank", str(rank)]
    command += ["--tensor-parallel-size", str(num_devices), "--coordinator", coordinator]
    return [*command, "--host-join-timeout", JOIN_TIMEOUT_S, *flags]


@contextlib.contextmanager
def running_hosts(
    golden: GoldenCheckpoint,
    num_hosts: int,
    num_devices: int,
    *flags: str,
    programs: Path,
    changes: Mapping[int, HostChange] = MappingProxyType({}),
) -> Iterator[Replica]:
    """A ready replica whose hosts are processes of this machine. programs: the compile cache of each host is below it.

    changes: what is different on a host, by rank.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-test-", ignore_cleanup_errors=True))
        server, *hosts = (
            stack.enter_context(
                launched(
                    [
                        *host_command(change.model or golden.path, rank, num_hosts, num_devices, coordinator, *flags),
                        *("--compile-cache", str(change.programs or programs / f"host-{rank}")),
                        *(("--port", "0", "--uds-dir", sockets, "--served-model-name", "tiny") if rank == 0 else ()),
                    ],
                    python_path=f"{change.startup}:{SOURCES}",
                )
            )
            for rank in range(num_hosts)
            for change in [changes.get(rank, HostChange())]
        )
        await_ready(server, START_TIMEOUT_S)
        yield Replica(server, hosts)


def greedy_body(golden: GoldenCheckpoint, num_tokens: int, **options: Any) -> dict[str, Any]:
    """Return a request that continues the golden prompt."""
    prompt = [int(token) for token in golden.prompt_ids]
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0} | options


def golden_tokens(golden: GoldenCheckpoint, num_tokens: int) -> list[str]:
    """Return the texts of transformers' tokens after the golden prompt, which one process generates as well."""
    tokenizer = load_tokenizer(golden.path)
    return [tokenizer.token_text(int(token)) for token in golden.output_ids[:num_tokens]]


def greedy_tokens(server: Server, golden: GoldenCheckpoint, num_tokens: int) -> list[str]:
    """Return the texts of the tokens that continue the golden prompt."""
    status, _, reply = server.request("POST", "/v1/completions", greedy_body(golden, num_tokens))
    assert status == 200, reply
    tokens: list[str] = json.loads(reply)["choices"][0]["logprobs"]["tokens"]
    return tokens
