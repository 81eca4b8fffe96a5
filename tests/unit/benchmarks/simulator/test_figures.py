"""Figures, tables and pictures of runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.cell import CellSettings
from benchmarks.simulator.figures import figures_of
from benchmarks.simulator.fleet import FleetSettings
from benchmarks.simulator.records import Records, joined
from tests.unit.benchmarks.simulator.simulated import table

SETTINGS = FleetSettings(
    cell=CellSettings(table=table(max_decode_steps=8, num_kv_blocks=100), policy="prefix", num_replicas=2),
    num_cells=1,
    workload="sharegpt",
    requests_per_s=4.0,
    num_requests=10,
)


def ten_requests() -> Records:
    """Request i arrives at i, has its first token after 0.1 s and its last, the 11th, a second later."""
    arrival_s = np.arange(10.0)
    count = np.full(10, 11, np.int32)
    return Records(
        arrival_s=arrival_s,
        first_s=arrival_s + 0.1,
        end_s=arrival_s + 1.1,
        num_prompt_tokens=np.full(10, 100, np.int32),
        num_cached_tokens=np.full(10, 25, np.int32),
        num_output_tokens=count,
        replica=np.arange(10, dtype=np.int32) % 2,
        is_failed=np.zeros(10, np.bool_),
        busy_s=np.array([2.0, 6.0]),
        num_steps=70,
        num_calls=10,
        num_preemptions=0,
        imbalances=np.array([1.0, 2.0]),
        routing_s=1e-3,
        cpu_s=1.0,
    )


def test_figures_are_those_of_the_records() -> None:
    figures = figures_of(SETTINGS, ten_requests(), 3.0)
    assert figures.hit_rate == 0.25
    assert figures.ttft_p50_s == pytest.approx(0.1)
    assert figures.ttft_p99_s == pytest.approx(0.1)
    assert figures.tpot_mean_s == pytest.approx(0.1)
    assert figures.output_tokens_per_s == pytest.approx(11 * 6 / 6 / 2)  # ends from 2 s to 8 s: at 2.1, 3.1 ... 7.1
    assert figures.busiest_over_mean == 1.5
    assert figures.requests_max_over_mean == 1.5
    assert figures.steps_per_call == 7
    assert figures.busy_share == pytest.approx(4.0 / 10.1)
    assert figures.requests_per_s == 2.0


def test_replicas_of_joined_cells_are_numbered_on() -> None:
    both = joined([ten_requests(), ten_requests()])
    assert both.replica.tolist() == [0, 1] * 5 + [2, 3] * 5
    assert (both.num_replicas, both.num_steps, len(both.arrival_s)) == (4, 140, 20)


@pytest.mark.slow
def test_a_picture_is_drawn_from_a_file_of_runs(tmp_path: Path) -> None:
    figures = figures_of(SETTINGS, ten_requests(), 3.0)
    runs = [
        msgspec.structs.replace(figures, requests_per_s=rate, policy=policy)
        for rate in (1.0, 2.0)
        for policy in ("prefix", "round-robin")
    ]
    (tmp_path / "runs.jsonl").write_bytes(b"\n".join(msgspec.json.encode(run) for run in runs))
    picture = tmp_path / "runs.svg"
    assert main(["plot", str(picture), str(tmp_path / "runs.jsonl"), "--title", "two policies"]) == 0
    text = picture.read_text()
    assert "exact pages" in text or "<path" in text
    assert text.count("<path") > 40
