"""Fleets: cells in processes, and the command."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.cell import CellSettings
from benchmarks.simulator.figures import Figures
from benchmarks.simulator.fleet import FleetSettings, run_fleet
from tests.unit.benchmarks.simulator.simulated import table


@pytest.mark.slow
def test_the_number_of_processes_changes_no_result() -> None:
    cell = CellSettings(table=table(max_decode_steps=8, num_kv_blocks=2000), policy="prefix", num_replicas=2)
    settings = FleetSettings(cell=cell, num_cells=3, workload="agentic", requests_per_s=6.0, num_requests=20, seed=4)
    one, two = run_fleet(settings), run_fleet(settings, num_processes=2)
    assert len(one.arrival_s) == 20
    assert one.num_replicas == 6
    for name in ("arrival_s", "first_s", "end_s", "replica", "num_cached_tokens", "busy_s"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_the_command_prints_a_table_and_appends_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.jsonl"
    words = ["run", "--replicas", "2", "--requests", "12", "--rates", "2", "--policies", "prefix", "round-robin"]
    assert main([*words, "--workloads", "bursts", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("| bursts |") == 2
    exact, blind = [msgspec.json.decode(line, type=Figures) for line in out.read_bytes().splitlines()]
    assert (exact.policy, blind.policy) == ("prefix", "round-robin")
    assert exact.num_requests == blind.num_requests == 12
    assert exact.source == "estimated"
    assert exact.hit_rate > blind.hit_rate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--replicas", "10", "--routers", "3"], "--replicas 10 do not divide among --routers 3"),
        (["run", "--table", "nothing"], "nothing.json"),
    ],
)
def test_mistakes_get_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
