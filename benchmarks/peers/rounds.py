"""Runs jaxserve beside one peer at a time: both are up, one is loaded while the other waits, and they take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.load import Cell, LoadFailedError, Sample, run_cell, seed_of
from benchmarks.peers.peer import Entrant, PeerUnavailableError
from benchmarks.peers.server import Server
from benchmarks.peers.weights import Weights
from benchmarks.processes import memory_of
from jaxserve.tools.bench.startup import free_port

WARM_UP_ROUND = -1
"""Round number of the warm-up load before round 0, which is not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Settings of a run for each peer."""

    weights: Weights
    cells: Sequence[Cell]
    num_rounds: int
    seed: int
    cpus: tuple[int, ...]
    folder: Path
    """For logs and raw figures."""
    start_timeout_s: float
    cell_timeout_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """Start of one server."""

    server: str
    command: tuple[str, ...]
    environment: dict[str, str]
    ready_s: float
    first_reply_s: float
    pss_mib: float
    """Before the first load."""


@dataclass(slots=True)
class Pairing:
    """All that was seen of jaxserve and one peer."""

    peer: str
    starts: list[Start] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    problem: str | None = None
    """Reason for missing figures of the pairing; None if it has all."""


def turns(round_number: int, servers: tuple[Server, Server]) -> tuple[Server, Server]:
    """Return the order of servers, which alternates (A B, B A, A B): a machine that gets slower favours neither."""
    first, second = servers
    return (first, second) if round_number % 2 == 0 else (second, first)


def run_pairing(ours: Entrant, peer: Entrant, plan: Plan, say: Callable[[str], None]) -> Pairing:
    """Start both, load them in turns, stop both. What goes wrong is noted in the pairing."""
    pairing = Pairing(peer.label)
    try:
        with _server(peer, plan) as theirs, _server(ours, plan) as own:
            for server in (own, theirs):
                pairing.starts.append(_start_of(server))
                say(
                    f"{server.label}: ready after {server.ready_s:.1f} s, first reply after {server.first_reply_s:.1f} s"
                )
            _run_rounds((own, theirs), plan, pairing, say)
    except (PeerUnavailableError, LoadFailedError) as error:
        pairing.problem = str(error)
        say(f"beside {peer.label}: {error}")
    return pairing


def _run_rounds(servers: tuple[Server, Server], plan: Plan, pairing: Pairing, say: Callable[[str], None]) -> None:
    for server in servers:
        most = max(plan.cells, key=lambda cell: cell.concurrency)
        _sample(server, servers, Cell(most.workload, most.concurrency, most.concurrency), WARM_UP_ROUND, plan)
    for round_number in range(plan.num_rounds):
        started_s = time.perf_counter()
        for cell in plan.cells:
            for server in turns(round_number, servers):
                sample = _sample(server, servers, cell, round_number, plan)
                pairing.samples.append(sample)
                say(_line(sample))
        say(f"round {round_number + 1} of {plan.num_rounds}: {time.perf_counter() - started_s:.0f} s")


def _sample(server: Server, servers: tuple[Server, Server], cell: Cell, round_number: int, plan: Plan) -> Sample:
    for each in servers:
        if not each.is_alive():
            raise PeerUnavailableError(f"{each.label} ended during the benchmark; its log is in {plan.folder}")
    return run_cell(
        server,
        [each for each in servers if each is not server],
        cell,
        round_number=round_number,
        seed=seed_of(plan.seed, round_number, cell),
        tokenizer=plan.weights.source,
        folder=plan.folder,
        timeout_s=plan.cell_timeout_s,
    )


def _server(entrant: Entrant, plan: Plan) -> Server:
    port = free_port()
    launch = entrant.peer.launch(plan.weights, entrant.format_name, port=port, cpus=plan.cpus)
    log = plan.folder / f"{entrant.label.replace(':', '-')}.log"
    return Server(entrant.label, launch, port, log=log, start_timeout_s=plan.start_timeout_s)


def _start_of(server: Server) -> Start:
    return Start(
        server=server.label,
        command=server.launch.command,
        environment=dict(server.launch.environment),
        ready_s=server.ready_s,
        first_reply_s=server.first_reply_s,
        pss_mib=memory_of(server.tree()).pss_mib,
    )


def _line(sample: Sample) -> str:
    figures, cores = sample.figures, sample.cores
    ttft_ms = figures.get("median_ttft_ms")
    return (
        f"  {sample.round + 1} {sample.cell.label:<13} {sample.server:<20} "
        f"{figures['output_throughput']:7.1f} tok/s, TTFT p50 {ttft_ms or float('nan'):6.0f} ms, "
        f"{figures['failed']} failed, cores: server {cores.loaded_server:.2f}, idle {cores.idle_servers:.2f}, "
        f"others {cores.others:.2f}"
    )
