"""Figures computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.bench.client import RequestRecord
from jaxserve.bench.report import percentile, summarise


def record(start: float, chunks: list[float], *, tokens: int, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        started_s=start,
        finished_s=chunks[-1] + 0.5 if chunks else start,
        chunk_times_s=chunks,
        num_prompt_tokens=10,
        num_output_tokens=tokens,
        error=error,
    )


def test_latencies_of_two_requests_are_those_computed_by_hand() -> None:
    figures = summarise(
        [record(0.0, [1.0, 1.1, 1.4], tokens=3), record(0.0, [2.0, 2.2], tokens=2)],
        duration_s=2.0,
    )
    assert figures["mean_ttft_ms"] == pytest.approx(1500)
    assert figures["median_ttft_ms"] == pytest.approx(1500)
    assert figures["mean_tpot_ms"] == pytest.approx(200)
    assert figures["mean_itl_ms"] == pytest.approx((100 + 300 + 200) / 3)
    assert figures["p99_itl_ms"] == pytest.approx(298)
    assert figures["mean_e2el_ms"] == pytest.approx((1900 + 2700) / 2)
    assert figures["output_throughput"] == pytest.approx(2.5)
    assert figures["std_ttft_ms"] == pytest.approx(500)


def test_chunks_of_several_tokens_do_not_distort_time_per_token() -> None:
    figures = summarise([record(0.0, [1.0, 2.0], tokens=5)], duration_s=1.0)
    assert figures["mean_tpot_ms"] == pytest.approx(250)
    assert figures["mean_itl_ms"] == pytest.approx(1000)


def test_one_token_gives_a_first_token_time_but_no_time_per_token() -> None:
    figures = summarise([record(0.0, [1.0], tokens=1)], duration_s=1.0)
    assert figures["mean_ttft_ms"] == pytest.approx(1000)
    assert figures["mean_tpot_ms"] is None
    assert figures["p99_itl_ms"] is None


def test_failed_requests_leave_every_figure_alone() -> None:
    good = record(0.0, [1.0, 1.1], tokens=2)
    bad = record(0.0, [9.0, 99.0], tokens=2, error="HTTP 500")
    alone, together = (summarise(records, duration_s=1.0) for records in ([good], [good, bad]))
    assert together == alone | {"failed": 1, "errors": {"HTTP 500": 1}}


@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(percent: int) -> None:
    values = np.random.default_rng(0).random(17).tolist()
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
