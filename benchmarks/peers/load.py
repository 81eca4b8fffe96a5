"""One cell of the benchmark on one server: `jaxserve bench serve` in a process of its own, and who used the cores."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import last_error, run_alone
from benchmarks.peers.peer import Launch
from benchmarks.peers.server import Server
from benchmarks.processes import memory_of, read_cpu_clock

NUM_WARMUPS = 1
"""Before the clock starts: it also puts the common prefix of `prefix` into the cache, on every server alike."""

DEFAULT_CONCURRENCY = {"chat": (1, 4, 16, 32), "prefix": (16,), "prefill": (4,), "long": (1,), "sharegpt": (16,)}
NUM_REQUESTS = {"chat": (8, 2), "prefix": (0, 2), "prefill": (4, 1), "long": (1, 1), "sharegpt": (8, 2)}
"""So many, and so many more for each stream."""


class LoadFailedError(Exception):
    """The load generator did not finish; the text is one readable line."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one concurrency."""

    workload: str
    concurrency: int
    num_prompts: int

    @property
    def label(self) -> str:
        return f"{self.workload} x {self.concurrency}"


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Cores used on average while a cell ran, the load generator's start and prompt making included."""

    loaded_server: float
    idle_servers: float
    load_generator: float
    others: float
    """By programs that have nothing to do with the benchmark: what makes its numbers worse than they are."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One cell on one server in one round."""

    server: str
    cell: Cell
    round: int
    figures: dict[str, Any]
    """Figures as written by `jaxserve bench serve --json`."""
    cores: CoreUse
    pss_mib: float
    peak_rss_mib: float


def make_cells(workloads: list[str], concurrency: list[int] | None, num_prompts: int | None) -> list[Cell]:
    """Every workload at its usual concurrencies and lengths, or at the given ones."""
    return [
        Cell(name, streams, num_prompts or num_requests(name, streams))
        for name in workloads
        for streams in (concurrency or DEFAULT_CONCURRENCY[name])
    ]


def num_requests(workload: str, num_streams: int) -> int:
    """Enough for a median, few enough for a slow peer."""
    least, per_stream = NUM_REQUESTS[workload]
    return max(2, least + per_stream * num_streams)


def seed_of(base: int, round_number: int, cell: Cell) -> int:
    """Return the seed: equal for all servers in a round, different in every round and cell."""
    return base + 1_000_000 * round_number + 1_000 * cell.concurrency


def load_command(launch: Launch, url: str, cell: Cell, *, seed: int, tokenizer: Path, json_file: Path) -> list[str]:
    """`tokenizer` counts the prompts here, for all servers alike: not all can be asked."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "bench", "serve", "--url", url, "--model", launch.model]
    command += ["--tokenizer", str(tokenizer), "--workload", cell.workload, "--max-concurrency", str(cell.concurrency)]
    command += ["--num-prompts", str(cell.num_prompts), "--num-warmups", str(NUM_WARMUPS), "--seed", str(seed)]
    command += ["--json", str(json_file)]
    if launch.extra_body:
        command += ["--extra-body", json.dumps(dict(launch.extra_body))]
    return command


def run_cell(
    server: Server,
    idle: list[Server],
    cell: Cell,
    *,
    round_number: int,
    seed: int,
    tokenizer: Path,
    folder: Path,
    timeout_s: float,
) -> Sample:
    """Load `server` while `idle` wait. Raises LoadFailedError when the load generator fails as a whole.

    Requests that fail are in the figures.
    """
    name = f"{server.label}-{cell.workload}-{cell.concurrency}-{round_number}".replace(":", "-")
    json_file, log = folder / f"{name}.json", folder / f"{name}.log"
    for earlier in (json_file, log):  # of another run into the same folder
        earlier.unlink(missing_ok=True)
    command = load_command(server.launch, server.url, cell, seed=seed, tokenizer=tokenizer, json_file=json_file)
    before = read_cpu_clock()
    busy_s = server.cpu_s()
    idle_s = sum(each.cpu_s() for each in idle)
    _run(command, log, timeout_s)
    busy_s = server.cpu_s() - busy_s
    idle_s = sum(each.cpu_s() for each in idle) - idle_s
    after = read_cpu_clock()
    if not json_file.is_file():
        raise LoadFailedError(f"{cell.label} on {server.label}: no figures; see {log}")
    wall_s, client_s = after.wall_s - before.wall_s, after.children_s - before.children_s
    cores = CoreUse(
        loaded_server=busy_s / wall_s,
        idle_servers=idle_s / wall_s,
        load_generator=client_s / wall_s,
        others=max(0.0, after.machine_s - before.machine_s - busy_s - idle_s - client_s) / wall_s,
    )
    memory = memory_of(server.tree())
    figures = json.loads(json_file.read_text(encoding="utf-8"))
    return Sample(server.label, cell, round_number, figures, cores, memory.pss_mib, memory.peak_rss_mib)


def _run(command: list[str], log: Path, timeout_s: float) -> None:
    """Exit code 1 with figures means that some requests failed: the figures tell."""
    try:
        code = run_alone(command, log, timeout_s)
    except subprocess.TimeoutExpired:
        raise LoadFailedError(f"the load generator took longer than {timeout_s:g} s; see {log}") from None
    if code not in (0, 1):
        raise LoadFailedError(f"{last_error(log.read_text(errors='replace'))} (see {log})")
