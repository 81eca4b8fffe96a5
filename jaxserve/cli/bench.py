"""`jaxserve bench serve` and `jaxserve bench startup`: options, progress, tables and JSON files."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxserve.bench.client import RequestRecord
from jaxserve.bench.prompts import TokenizeError
from jaxserve.bench.report import LATENCIES, PERCENTILES
from jaxserve.bench.serving import BenchmarkError, Load, run_load
from jaxserve.bench.startup import StartFailedError, measure_startup
from jaxserve.bench.workload import WorkloadName, make_workload
from jaxserve.cli.options import environment_api_key, server_url
from jaxserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxserve bench serve [OPTIONS] | jaxserve bench startup [OPTIONS] [-- SERVE OPTIONS]"
    kinds = parser.add_subparsers(dest="kind", metavar="{serve,startup}")
    for name, summary, usage, fill in (
        ("serve", "load a running server", "[OPTIONS]", _add_serve),
        ("startup", "time `jaxserve serve` until it is ready", "[OPTIONS] [-- SERVE OPTIONS]", _add_startup),
    ):
        usage = f"jaxserve bench {name} {usage}"
        fill(kinds.add_parser(name, help=summary, description=summary, usage=usage, allow_abbrev=False))


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or 1 when a request failed or a server did not start."""
    if arguments.kind is None:
        raise ConfigError("choose what to measure: `jaxserve bench serve` or `jaxserve bench startup`")
    try:
        figures = _run_serve(arguments) if arguments.kind == "serve" else _run_startup(arguments)
    except (BenchmarkError, TokenizeError, StartFailedError) as error:
        print(f"jaxserve bench: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 1 if figures.get("failed") else 0


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="base URL of the server (default: from JAXSERVE_HOST and JAXSERVE_PORT)")
    parser.add_argument("--model", help="model to ask for (default: the first one the server lists)")
    parser.add_argument("--workload", choices=get_args(WorkloadName), default="chat", help="default: chat")
    parser.add_argument("--num-prompts", type=_positive, default=32, metavar="N", help="requests (default: 32)")
    parser.add_argument(
        "--num-warmups", type=_count, default=0, metavar="N", help="requests before the clock starts (default: 0)"
    )
    parser.add_argument("--max-concurrency", type=_positive, metavar="N", help="requests at a time (default: all)")
    parser.add_argument(
        "--request-rate", type=_rate, default=math.inf, metavar="X", help="requests a second, Poisson (default: inf)"
    )
    parser.add_argument("--input-len", type=_positive, metavar="N", help="prompt tokens instead of the workload's")
    parser.add_argument("--output-len", type=_positive, metavar="N", help="output tokens instead of the workload's")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrival times (default: 0)")
    parser.add_argument("--api-key", help="sent as bearer token (default: JAXSERVE_API_KEY)")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="of a request (default: 3600)")
    parser.add_argument("--json", metavar="FILE", help="write the figures, named as `vllm bench serve` names them")


def _add_startup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-warm", type=_count, default=3, metavar="N", help="warm starts after the cold one")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of a start (default: 600)")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("serve_words", nargs="*", metavar="SERVE OPTIONS", help="after `--`: MODEL and flags of serve")


def _run_serve(arguments: argparse.Namespace) -> dict[str, Any]:
    workload = make_workload(
        arguments.workload, num_prompt_tokens=arguments.input_len, num_output_tokens=arguments.output_len
    )
    load = Load(
        url=(arguments.url or server_url()).rstrip("/"),
        model=arguments.model,
        workload=workload,
        num_prompts=arguments.num_prompts,
        num_warmups=arguments.num_warmups,
        max_concurrency=arguments.max_concurrency,
        request_rate=arguments.request_rate,
        seed=arguments.seed,
        api_key=arguments.api_key or environment_api_key(),
        timeout_s=arguments.timeout,
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(f"{workload.name} requests", total=load.num_prompts)

        def on_done(record: RequestRecord) -> None:
            del record
            progress.advance(task)

        figures = asyncio.run(run_load(load, on_done=on_done))
    _print_serving(figures)
    return figures


def _run_startup(arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", *arguments.serve_words]
    figures = measure_startup(command, num_warm=arguments.num_warm, timeout_s=arguments.timeout)
    table = Table("start", "answers HTTP (s)", "ready (s)")
    table.add_row("cold", f"{figures['cold_listening_s']:.2f}", f"{figures['cold_ready_s']:.2f}")
    if figures["warm_ready_s"]:
        listening, ready = (statistics.median(figures[f"warm_{kind}_s"]) for kind in ("listening", "ready"))
        table.add_row(f"warm, median of {arguments.num_warm}", f"{listening:.2f}", f"{ready:.2f}")
    Console().print(table)
    return figures


def _print_serving(figures: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{figures['workload']} on {figures['model_id']}", highlight=False)
    totals = Table(show_header=False)
    for name, key, form in (
        ("completed", "completed", "d"),
        ("failed", "failed", "d"),
        ("duration (s)", "duration", ".2f"),
        ("prompt tokens", "total_input_tokens", "d"),
        ("  of them cached", "total_cached_tokens", "d"),
        ("output tokens", "total_output_tokens", "d"),
        ("requests/s", "request_throughput", ".2f"),
        ("output tokens/s", "output_throughput", ".1f"),
        ("all tokens/s", "total_token_throughput", ".1f"),
    ):
        totals.add_row(name, format(figures[key], form))
    kinds = ("mean", "median", *(f"p{percent}" for percent in PERCENTILES))
    latencies = Table("latency (ms)", *kinds)
    for key, name in LATENCIES.items():
        values = [figures[f"{kind}_{key}_ms"] for kind in kinds]
        latencies.add_row(name, *("-" if value is None else f"{value:.1f}" for value in values))
    console.print(totals, latencies)
    for error, count in figures["errors"].items():
        console.print(f"{count} x {error}", style="red", markup=False)


def _positive(text: str) -> int:
    return _at_least(int(text), 1)


def _count(text: str) -> int:
    return _at_least(int(text), 0)


def _at_least(value: int, least: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of requests a second")
    return value
