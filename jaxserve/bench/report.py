"""Turns request records into the figures of `vllm bench serve`, under its JSON names.

    ttft  time to first token: request sent until the first chunk with text
    tpot  time per output token after the first, one value per request: (last - first chunk) / (tokens - 1)
    itl   inter-token latency: every gap between two chunks with text
    e2el  end to end latency of a request

Only completed requests count; `failed` ones are counted and their errors listed.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxserve.bench.client import RequestRecord

PERCENTILES = (90, 99)
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end latency",
}


def summarise(records: Sequence[RequestRecord], *, duration_s: float) -> dict[str, Any]:
    """All figures of one run; latencies in milliseconds, None where no request gave a value."""
    done = [record for record in records if record.error is None]
    num_prompt_tokens = sum(record.num_prompt_tokens for record in done)
    num_output_tokens = sum(record.num_output_tokens for record in done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_prompt_tokens,
        "total_cached_tokens": sum(record.num_cached_tokens for record in done),
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(done) / duration_s,
        "output_throughput": num_output_tokens / duration_s,
        "total_token_throughput": (num_prompt_tokens + num_output_tokens) / duration_s,
    }
    for name, values_s in _latencies(done).items():
        figures |= _spread(name, values_s)
    errors = Counter(record.error for record in records if record.error is not None)
    figures["errors"] = dict(errors.most_common(10))
    return figures


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default. `values` must not be empty."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _latencies(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    told = [record for record in done if record.chunk_times_s]
    return {
        "ttft": [record.chunk_times_s[0] - record.started_s for record in told],
        "tpot": [
            (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.num_output_tokens - 1)
            for record in told
            if record.num_output_tokens > 1
        ],
        "itl": [gap for record in told for gap in _gaps(record.chunk_times_s)],
        "e2el": [record.finished_s - record.started_s for record in done],
    }


def _gaps(times_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def _spread(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    values_ms = [value * 1000 for value in values_s]
    if not values_ms:
        return dict.fromkeys(_spread(name, [0.0]))
    return {
        f"mean_{name}_ms": statistics.fmean(values_ms),
        f"median_{name}_ms": percentile(values_ms, 50),
        f"std_{name}_ms": statistics.pstdev(values_ms),
        **{f"p{percent}_{name}_ms": percentile(values_ms, percent) for percent in PERCENTILES},
    }
