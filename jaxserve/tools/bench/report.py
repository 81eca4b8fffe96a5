"""Turns request records into the figures of `vllm bench serve`, under its JSON names.

    ttft  time to first token: request sent until the first chunk with text
    tpot  time per output token after the first, one value per request: (last - first chunk) / (tokens - 1)
    itl   inter-token latency: every gap between two chunks with text
    e2el  end-to-end latency of a request

Only completed requests count; failed ones are counted by kind and their errors listed.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.client import RequestRecord

DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)
MAX_ERRORS = 10
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
GoodputMetric = Literal["ttft", "tpot", "e2el"]
GOODPUT_METRICS: tuple[GoodputMetric, ...] = ("ttft", "tpot", "e2el")


def check_target(flag: str, file: Path) -> None:
    """Raise ConfigError if the file that `flag` names cannot be written: before an hour of measuring, not after it."""
    if not os.path.isdir(file.parent):
        raise ConfigError(f"{flag} {file}: {file.parent} is not a directory")
    if os.path.isdir(file):
        raise ConfigError(f"{flag} {file}: is a directory, expected a file")
    if not os.access(file if os.path.exists(file) else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {file}: no permission to write it")


def summarise(
    records: Sequence[RequestRecord],
    *,
    duration_s: float,
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    goodput_ms: Mapping[GoodputMetric, float] | None = None,
) -> dict[str, Any]:
    """Return all figures of one run; latencies in milliseconds, None if no request has a value.

    goodput_ms: limits that a good request keeps, all of them.
    """
    done = [record for record in records if record.error is None]
    num_prompt_tokens = sum(record.num_prompt_tokens for record in done)
    num_output_tokens = sum(record.num_output_tokens for record in done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "mismatched_inputs": sum(record.num_prompt_tokens != record.num_sent_tokens for record in done),
        "short_outputs": sum(record.num_output_tokens < record.num_wanted_tokens for record in done),
        "total_input_tokens": num_prompt_tokens,
        "total_cached_tokens": sum(record.num_cached_tokens for record in done),
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(done) / duration_s,
        "request_goodput": _num_good(done, goodput_ms) / duration_s if goodput_ms else None,
        "output_throughput": num_output_tokens / duration_s,
        "total_token_throughput": (num_prompt_tokens + num_output_tokens) / duration_s,
        "max_concurrent_requests": _most_at_once(records),
    }
    for name, values_s in latencies(done).items():
        figures |= _spread(name, values_s, percentiles)
    figures["error_kinds"] = dict(Counter(record.error_kind for record in records if record.error_kind is not None))
    errors = Counter(record.error for record in records if record.error is not None)
    figures["errors"] = dict(errors.most_common(MAX_ERRORS))
    return figures


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return one value per request, in the order of sending; in seconds, as in vLLM's detailed results."""
    start_s = min((record.started_s for record in records), default=0.0)
    return {
        "start_times": [record.started_s - start_s for record in records],
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [_ttft_s(record) for record in records],
        "itls": [_gaps(record.chunk_times_s) for record in records],
        "e2els": [record.finished_s - record.started_s for record in records],
        "request_errors": [record.error for record in records],
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between ranks. `values` must not be empty."""
    return float(np.percentile(values, percent))


def latencies(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return all values of each latency, in seconds."""
    return {
        "ttft": [value for record in done if (value := _ttft_s(record)) is not None],
        "tpot": [value for record in done if (value := _tpot_s(record)) is not None],
        "itl": [gap for record in done for gap in _gaps(record.chunk_times_s)],
        "e2el": [record.finished_s - record.started_s for record in done],
    }


def _ttft_s(record: RequestRecord) -> float | None:
    return record.chunk_times_s[0] - record.started_s if record.chunk_times_s else None


def _tpot_s(record: RequestRecord) -> float | None:
    if not record.chunk_times_s or record.num_output_tokens < 2:
        return None
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.num_output_tokens - 1)


def _num_good(done: Sequence[RequestRecord], limits_ms: Mapping[GoodputMetric, float]) -> int:
    """Count the requests that keep all limits. A request of one token has no time per output token."""

    def is_good(record: RequestRecord) -> bool:
        values_s = {"ttft": _ttft_s(record), "tpot": _tpot_s(record), "e2el": record.finished_s - record.started_s}
        return all((values_s[name] or 0.0) * 1000 <= limit for name, limit in limits_ms.items())

    return sum(map(is_good, done))


def _most_at_once(records: Sequence[RequestRecord]) -> int:
    changes = [(record.started_s, 1) for record in records] + [(record.finished_s, -1) for record in records]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _gaps(times_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def _spread(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    values_ms = [value * 1000 for value in values_s]
    if not values_ms:
        return dict.fromkeys(_spread(name, [0.0], percentiles))
    return {
        f"mean_{name}_ms": statistics.fmean(values_ms),
        f"median_{name}_ms": percentile(values_ms, 50),
        f"std_{name}_ms": statistics.pstdev(values_ms),
        **{f"p{percent:g}_{name}_ms": percentile(values_ms, percent) for percent in percentiles},
    }
