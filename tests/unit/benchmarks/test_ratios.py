"""Comparisons of two servers over rounds."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.load import Cell, CoreUse, Sample
from benchmarks.peers.ratios import Comparison, compare, faults

CHAT = Cell("chat", 4, 16)
QUIET = CoreUse(loaded_server=1.9, idle_servers=0.0, load_generator=0.1, others=0.0)


def sample(server: str, round_number: int, *, cell: Cell = CHAT, **figures: Any) -> Sample:
    base = {"failed": 0, "errors": {}, "total_input_tokens": 2048, "duration": 10.0, "output_throughput": 50.0}
    return Sample(server, cell, round_number, base | figures, QUIET, 100.0, 120.0)


def of(comparisons: list[Comparison], metric: str) -> Comparison:
    (found,) = [each for each in comparisons if each.metric == metric]
    return found


def test_ratio_is_the_median_of_the_rounds_ratios_not_the_ratio_of_medians() -> None:
    # The machine was twice as fast in round 1; each round's ratio is not touched by that.
    rates = {"jaxserve": (60.0, 100.0, 90.0), "peer": (30.0, 80.0, 90.0)}
    samples = [
        sample(server, number, output_throughput=rate)
        for server, values in rates.items()
        for number, rate in enumerate(values)
    ]
    found = of(compare(samples, ours="jaxserve", peer="peer"), "output_throughput")
    assert found.ratio == pytest.approx(1.25)
    assert (found.least_ratio, found.most_ratio) == (1.0, 2.0)
    assert (found.ours, found.theirs, found.num_rounds) == (90.0, 80.0, 3)


def test_a_round_that_only_one_server_finished_counts_for_neither() -> None:
    samples = [
        sample("jaxserve", 0, median_ttft_ms=100.0),
        sample("peer", 0, median_ttft_ms=200.0),
        sample("jaxserve", 1, median_ttft_ms=900.0),
        sample("peer", 1, median_ttft_ms=None),
    ]
    found = of(compare(samples, ours="jaxserve", peer="peer"), "median_ttft_ms")
    assert (found.ours, found.ratio, found.num_rounds) == (100.0, 0.5, 1)


def test_a_metric_that_no_request_gave_has_no_comparison() -> None:
    samples = [sample("jaxserve", 0), sample("peer", 0)]
    assert {each.metric for each in compare(samples, ours="jaxserve", peer="peer")} == {
        "output_throughput",
        "input_throughput",
    }


def test_cells_are_compared_apart() -> None:
    wide = Cell("chat", 32, 64)
    samples = [
        sample(server, 0, cell=cell, output_throughput=rate)
        for server, cell, rate in (
            ("jaxserve", CHAT, 20.0),
            ("peer", CHAT, 10.0),
            ("jaxserve", wide, 30.0),
            ("peer", wide, 10.0),
        )
    ]
    found = [each for each in compare(samples, ours="jaxserve", peer="peer") if each.metric == "output_throughput"]
    assert [(each.cell, each.ratio) for each in found] == [(CHAT, 2.0), (wide, 3.0)]


def test_faults_name_failed_requests_short_outputs_and_prompts_counted_differently() -> None:
    samples = [
        sample("jaxserve", 0, failed=2, errors={"HTTP 500": 2}),
        sample("peer", 0, short_outputs=3),
        sample("jaxserve", 1),
        sample("peer", 1, total_input_tokens=2040),
    ]
    assert faults(samples) == [
        "jaxserve, chat x 4, round 0: 2 of 16 requests failed: HTTP 500",
        "peer, chat x 4, round 0: 3 outputs shorter than asked for",
        "chat x 4, round 1: prompts counted differently: jaxserve 2048, peer 2040",
    ]


def test_clean_samples_have_no_faults() -> None:
    assert faults([sample("jaxserve", 0), sample("peer", 0)]) == []
