"""Tables of `jaxserve bench` on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.tools.bench.report import LATENCIES

Figures = Mapping[str, Any]

FAILED = ("failed", "failed", "d")
RATES = (
    ("requests/s", "request_throughput", ".2f"),
    ("  of them good", "request_goodput", ".2f"),
    ("output tokens/s", "output_throughput", ".1f"),
    ("all tokens/s", "total_token_throughput", ".1f"),
)
TOTALS = (
    ("completed", "completed", "d"),
    FAILED,
    ("duration (s)", "duration", ".2f"),
    ("prompt tokens", "total_input_tokens", "d"),
    ("  of them cached", "total_cached_tokens", "d"),
    ("output tokens", "total_output_tokens", "d"),
    *RATES,
)
SWEEP = (FAILED, *RATES)


def print_run(figures: Figures, percentiles: Sequence[float]) -> None:
    """Print the totals and latencies of one run."""
    console = Console()
    totals = Table(show_header=False)
    for name, key, form in TOTALS:
        if figures[key] is not None:
            totals.add_row(name, format(figures[key], form))
    kinds = ("mean", "median", *(f"p{percent:g}" for percent in percentiles if percent != 50))
    latencies = Table("latency (ms)", *kinds)
    for key, name in LATENCIES.items():
        latencies.add_row(name, *(_number(figures[f"{kind}_{key}_ms"], ".1f") for kind in kinds))
    console.print(totals, latencies)


def print_sweep(runs: Sequence[Figures], percentiles: Sequence[float]) -> None:
    """Print several runs, one column each."""
    rows = [row for row in SWEEP if any(run[row[1]] is not None for run in runs)]
    for latency, name in LATENCIES.items():
        rows.append((f"{name} (ms), median", f"median_{latency}_ms", ".1f"))
        if (highest := max(percentiles)) > 50:
            rows.append((f"{name} (ms), p{highest:g}", f"p{highest:g}_{latency}_ms", ".1f"))
    table = Table("requests at a time")
    for run in runs:
        table.add_column(_number(run["max_concurrency"], "d"), justify="right")
    for name, key, form in rows:
        table.add_row(name, *(_number(run[key], form) for run in runs))
    Console().print(table)


def print_notes(runs: Sequence[Figures]) -> None:
    """Print what makes figures incomparable, and the errors."""
    console = Console()
    omitted = sorted({name for run in runs for name in run.get("omitted_fields", ())})
    if omitted:
        console.print(f"the server refuses {', '.join(omitted)}: sent without", style="yellow", markup=False)
    if num_mismatched := sum(run["mismatched_inputs"] for run in runs):
        text = f"the server read another number of tokens than counted here in {num_mismatched} requests"
        console.print(text, style="yellow", markup=False)
    if num_short := sum(run["short_outputs"] for run in runs):
        text = f"{num_short} requests ended before the wanted number of tokens: do not compare their throughput"
        console.print(text, style="yellow", markup=False)
    sources = {run.get("output_tokens_from", "usage") for run in runs} - {"usage"}
    if sources:
        console.print(f"output tokens were counted by {', '.join(sorted(sources))}: usage was missing", style="yellow")
    for run in runs:
        for error, count in run["errors"].items():
            console.print(f"{count} x {error}", style="red", markup=False)


def print_engine(figures: Figures) -> None:
    """Print the engine's figures of an offline run."""
    totals = Table(show_header=False)
    for name, text in (
        ("steps", f"{figures['num_steps']}"),
        ("device (s)", f"{figures['device_seconds']:.2f}, {figures['device_share']:.0%} of the time"),
        ("padding", f"{figures['padding_share']:.1%} of the computed rows"),
        ("preemptions", f"{figures['num_preemptions']}"),
        ("drafts", f"{figures['num_accepted_tokens']} of {figures['num_draft_tokens']} tokens were right"),
        ("host gap (ms)", " / ".join(_number(figures[f"{k}_host_gap_ms"], ".3f") for k in ("median", "p99"))),
        ("compilations while serving", f"{figures['compilations'].get('serving', 0)}"),
    ):
        totals.add_row(name, text)
    programs = Table("program", "steps", "device (s)")
    seconds = figures["device_seconds_by_program"]
    for program, count in figures["steps_by_program"].items():
        programs.add_row(program, str(count), _number(seconds.get(program), ".3f"))
    Console().print(totals, programs)


def print_startup(figures: Figures) -> None:
    """Print the cold start and the median of the warm ones."""
    table = Table("start", "answers HTTP (s)", "ready (s)")
    table.add_row("cold", f"{figures['cold_listening_s']:.2f}", f"{figures['cold_ready_s']:.2f}")
    if warm := figures["warm_ready_s"]:
        listening = statistics.median(figures["warm_listening_s"])
        table.add_row(f"warm, median of {len(warm)}", f"{listening:.2f}", f"{statistics.median(warm):.2f}")
    Console().print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
