"""Figures computed by hand."""

from __future__ import annotations

import pytest

from jaxserve.tools.bench.client import RequestRecord
from jaxserve.tools.bench.report import details, summarise


def record(start: float, chunks: list[float], *, tokens: int, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        started_s=start,
        finished_s=chunks[-1] + 0.5 if chunks else start,
        chunk_times_s=chunks,
        num_prompt_tokens=10,
        num_output_tokens=tokens,
        error=error,
        error_kind=None if error is None else "http",
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
    expected = {"failed": 1, "errors": {"HTTP 500": 1}, "error_kinds": {"http": 1}, "max_concurrent_requests": 2}
    assert together == alone | expected


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    records = [
        record(0.0, [1.0, 1.1], tokens=2),  # ttft 1,000 ms, tpot 100, e2el 1,600
        record(0.0, [2.0, 2.1], tokens=2),
        record(0.0, [1.0, 1.4], tokens=2),
        record(0.0, [1.0], tokens=1),  # no time per token to be too slow
        record(0.0, [0.1, 0.2], tokens=2, error="HTTP 500"),
    ]

    def goodput(**limits: float) -> float | None:
        value = summarise(records, duration_s=2.0, goodput_ms=limits)["request_goodput"]
        assert value is None or isinstance(value, float)
        return value

    assert goodput() is None
    assert goodput(ttft=1500.0) == pytest.approx(3 / 2)
    assert goodput(ttft=1500.0, tpot=200.0) == pytest.approx(2 / 2)
    assert goodput(e2el=1600.5) == pytest.approx(2 / 2)
    assert goodput(tpot=1.0) == pytest.approx(1 / 2)


def test_percentiles_are_those_asked_for() -> None:
    figures = summarise([record(0.0, [1.0, 2.0], tokens=2)], duration_s=1.0, percentiles=[25, 99.9])
    assert {key for key in figures if key.endswith("_ttft_ms")} == {
        f"{kind}_ttft_ms" for kind in ("mean", "median", "std", "p25", "p99.9")
    }


def test_details_are_one_value_per_request() -> None:
    values = details([record(5.0, [6.0, 6.1], tokens=2), record(5.5, [], tokens=0, error="HTTP 500")])
    assert values["start_times"] == [0.0, 0.5]
    assert values["ttfts"] == [1.0, None]
    assert values["itls"] == [[pytest.approx(0.1)], []]
    assert (values["output_lens"], values["request_errors"]) == ([2, 0], [None, "HTTP 500"])


def test_most_requests_at_a_time_are_counted() -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (1.5, 3.0), (3.0, 4.0)]
    records = [RequestRecord(started_s=start, finished_s=end) for start, end in spans]
    assert summarise(records, duration_s=4.0)["max_concurrent_requests"] == 2
