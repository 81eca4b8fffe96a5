"""jaxserve and a peer in turns, with small servers in their places and a load that takes no time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.__main__ import install
from benchmarks.peers.load import Cell, CoreUse, LoadFailedError, Sample
from benchmarks.peers.peer import Entrant, Launch, PeerUnavailableError
from benchmarks.peers.rounds import Plan, run_pairing
from benchmarks.peers.server import Server
from benchmarks.peers.weights import Weights

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CHAT, PREFILL = Cell("chat", 4, 16), Cell("prefill", 2, 4)


@dataclass
class SmallPeer:
    name: str
    script: str = SERVER
    fault: str | None = None
    formats: tuple[str, ...] = ("f32",)

    def install(self) -> None:
        if self.fault:
            raise PeerUnavailableError(self.fault)

    def prepare(self, weights: Weights, format_name: str) -> None:
        pass

    def launch(self, weights: Weights, format_name: str, *, port: int, cpus: tuple[int, ...]) -> Launch:
        return Launch(command=(sys.executable, "-c", self.script, str(port)))

    def versions(self) -> Mapping[str, str]:
        return {}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(
        weights=Weights(tmp_path / "m.gguf", tmp_path),
        cells=[CHAT, PREFILL],
        num_rounds=2,
        seed=0,
        cpus=(0,),
        folder=tmp_path,
        start_timeout_s=20,
        cell_timeout_s=20,
    )


class Loads:
    """Stands in for `run_cell`: notes who was loaded while who waited."""

    def __init__(self, failing_round: int | None = None) -> None:
        self.seen: list[tuple[str, str, int, int]] = []
        self._failing_round = failing_round

    def __call__(
        self, server: Server, idle: list[Server], cell: Cell, *, round_number: int, seed: int, **others: Any
    ) -> Sample:
        assert [each.is_alive() for each in (server, *idle)] == [True, True]
        if round_number == self._failing_round:
            raise LoadFailedError("the load generator ended")
        self.seen.append((server.label, cell.workload, round_number, seed))
        return Sample(server.label, cell, round_number, figures(), CoreUse(1.0, 0.0, 0.0, 0.0), 1.0, 1.0)


def figures() -> dict[str, Any]:
    return {"output_throughput": 10.0, "median_ttft_ms": 5.0, "failed": 0}


def pair(plan: Plan, peer: SmallPeer) -> Any:
    lines: list[str] = []
    return run_pairing(Entrant(SmallPeer("jaxserve"), "f32"), Entrant(peer, "f32"), plan, lines.append)


def test_servers_take_turns_cell_by_cell_and_swap_places_each_round(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads()
    monkeypatch.setattr("benchmarks.peers.rounds.run_cell", loads)
    pairing = pair(plan, SmallPeer("peer"))
    assert pairing.problem is None
    counted = [(server, workload, number) for server, workload, number, _ in loads.seen if number >= 0]
    assert counted == [
        ("jaxserve", "chat", 0),
        ("peer", "chat", 0),
        ("jaxserve", "prefill", 0),
        ("peer", "prefill", 0),
        ("peer", "chat", 1),
        ("jaxserve", "chat", 1),
        ("peer", "prefill", 1),
        ("jaxserve", "prefill", 1),
    ]
    assert [(each.server, each.cell.workload, each.round) for each in pairing.samples] == counted


def test_both_get_the_same_prompts_in_a_round_and_new_ones_in_the_next(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads()
    monkeypatch.setattr("benchmarks.peers.rounds.run_cell", loads)
    pair(plan, SmallPeer("peer"))
    seeds: dict[tuple[str, int], list[int]] = {}
    for _, workload, number, seed in loads.seen:
        seeds.setdefault((workload, number), []).append(seed)
    assert all(len(used) == 2 and len(set(used)) == 1 for used in seeds.values())
    assert seeds["chat", 0] != seeds["chat", 1] != seeds["chat", -1]


def test_a_load_that_fails_ends_the_pairing_and_keeps_what_was_measured(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.rounds.run_cell", Loads(failing_round=1))
    pairing = pair(plan, SmallPeer("peer"))
    assert pairing.problem == "the load generator ended"
    assert {each.round for each in pairing.samples} == {0}


def test_a_peer_that_does_not_start_is_a_problem_of_its_pairing_alone(plan: Plan) -> None:
    pairing = pair(plan, SmallPeer("peer", script="raise SystemExit('no such model')"))
    assert pairing.problem is not None
    assert pairing.problem.startswith("peer: ended before it was ready: no such model")
    assert pairing.samples == []


def test_a_peer_that_cannot_be_installed_is_skipped_and_the_others_go_on(plan: Plan) -> None:
    broken, good = (Entrant(SmallPeer(name, fault=fault), "f32") for name, fault in (("a", "no compiler"), ("b", None)))
    assert install([broken, good], plan.weights) == ([good], {"a": "no compiler"})
