"""The figures of a run. Only requests that arrive in steady state count, except where all are meant."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from benchmarks.simulator.fleet import FleetSettings
from benchmarks.simulator.records import Records

WARMUP_SHARE = 0.2
"""The share of the first requests that is not counted: caches fill and batches grow."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a result file. Latencies in seconds."""

    policy: str
    workload: str
    table: str
    source: str
    """`measured` or `estimated`: the step times."""
    num_replicas: int
    num_cells: int
    requests_per_s: float
    """Offered load for each replica."""
    seed: int
    num_requests: int
    num_failed: int
    hit_rate: float
    """Cached prompt tokens over all prompt tokens."""
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    """Mean over requests of the time per output token after the first."""
    output_tokens_per_s: float
    """For each replica, while requests arrive."""
    busy_share: float
    """Device time over time, mean over the replicas."""
    busiest_over_mean: float
    """Device time of the busiest replica over the mean."""
    requests_max_over_mean: float
    """Requests of the fullest replica of a router over the mean of its replicas, averaged over time."""
    num_preemptions: int
    steps_per_call: float
    """Model steps for each call of the scheduler."""
    routing_us: float
    """Processor time of a routing decision."""
    cpu_s: float
    """Processor time of the simulation."""
    wall_s: float
    virtual_s: float
    """Simulated time until the last request ended."""


def figures_of(settings: FleetSettings, records: Records, wall_s: float) -> Figures:
    """Return the figures of a run."""
    num_requests = len(records.arrival_s)
    last_s = float(np.sort(records.arrival_s)[int(0.9 * (num_requests - 1))])
    start_s = float(np.sort(records.arrival_s)[int(WARMUP_SHARE * num_requests)])
    counted = (records.arrival_s >= start_s) & (records.arrival_s <= last_s) & ~records.is_failed
    ttft_s = (records.first_s - records.arrival_s)[counted]
    several = counted & (records.num_output_tokens > 1)
    tpot_s = ((records.end_s - records.first_s)[several]) / (records.num_output_tokens[several] - 1)
    has_ended = (records.end_s >= start_s) & (records.end_s <= last_s) & ~records.is_failed
    end_s = float(records.end_s.max())
    return Figures(
        policy=settings.cell.policy,
        workload=settings.workload,
        table=settings.cell.table.title,
        source=settings.cell.table.source,
        num_replicas=settings.num_replicas,
        num_cells=settings.num_cells,
        requests_per_s=settings.requests_per_s / settings.num_replicas,
        seed=settings.seed,
        num_requests=num_requests,
        num_failed=int(records.is_failed.sum()),
        hit_rate=_share(records.num_cached_tokens[counted], records.num_prompt_tokens[counted]),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        tpot_mean_s=float(tpot_s.mean()),
        output_tokens_per_s=float(records.num_output_tokens[has_ended].sum())
        / (last_s - start_s)
        / settings.num_replicas,
        busy_share=float(records.busy_s.mean()) / end_s,
        busiest_over_mean=float(records.busy_s.max() / records.busy_s.mean()),
        requests_max_over_mean=float(records.imbalances.mean()),
        num_preemptions=records.num_preemptions,
        steps_per_call=records.num_steps / records.num_calls,
        routing_us=1e6 * records.routing_s / num_requests,
        cpu_s=records.cpu_s,
        wall_s=wall_s,
        virtual_s=end_s,
    )


def _share(part: np.ndarray, whole: np.ndarray) -> float:
    return float(part.sum(dtype=np.int64) / whole.sum(dtype=np.int64))


def as_markdown(rows: list[Figures]) -> str:
    """Return the table of runs."""
    columns: dict[str, Any] = {
        "trace": lambda f: f.workload,
        "replicas": lambda f: f"{f.num_replicas:,}",
        "requests": lambda f: f"{f.num_requests:,}",
        "requests/s each": lambda f: f"{f.requests_per_s:g}",
        "policy": lambda f: f.policy,
        "hit rate": lambda f: f"{f.hit_rate:.1%}",
        "TTFT p50 ms": lambda f: f"{1000 * f.ttft_p50_s:.0f}",
        "TTFT p99 ms": lambda f: f"{1000 * f.ttft_p99_s:,.0f}",
        "TPOT ms": lambda f: f"{1000 * f.tpot_mean_s:.1f}",
        "output tok/s each": lambda f: f"{f.output_tokens_per_s:,.0f}",
        "device busy": lambda f: f"{f.busy_share:.0%}",
        "fullest / mean": lambda f: f"{f.requests_max_over_mean:.2f}",
        "routing µs": lambda f: f"{f.routing_us:.0f}",
        "CPU s": lambda f: f"{f.cpu_s:,.0f}",
    }
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    lines += ["| " + " | ".join(text(row) for text in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"
