"""`jaxserve bench serve`, `bench offline` and `bench startup`: flags, progress, tables and files."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxserve.cli.flags import config_from_flags
from jaxserve.cli.internal.bench_flags import add_offline, add_serve, add_startup
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.runtime.environment import base_url, child_environment, environment_api_key, restart_with
from jaxserve.runtime.spawn import engine_environment
from jaxserve.tools.bench.client import BenchmarkError, RequestRecord
from jaxserve.tools.bench.plot import check_plot, draw
from jaxserve.tools.bench.report import LATENCIES, check_target
from jaxserve.tools.bench.serving import Level, Load, connected
from jaxserve.tools.bench.startup import StartFailedError, measure_startup
from jaxserve.tools.bench.tokens import TokenizeError
from jaxserve.tools.bench.workload import Workload, make_workload
from jaxserve.tools.client import RemoteError

Figures = dict[str, Any]
_LEAST_WIDTH: Final = 200

FAILED = ("failed", "failed", "d")
RATES = (
    ("requests/s", "request_throughput", ".2f"),
    ("  of them good", "request_goodput", ".2f"),
    ("output tokens/s", "output_throughput", ".1f"),
    ("all tokens/s", "total_token_throughput", ".1f"),
)
PROMPT_TOKENS = (("prompt tokens", "total_input_tokens", "d"), ("  of them cached", "total_cached_tokens", "d"))
TOTALS = (
    ("completed", "completed", "d"),
    FAILED,
    ("duration (s)", "duration", ".2f"),
    *PROMPT_TOKENS,
    ("output tokens", "total_output_tokens", "d"),
    *RATES,
)
SWEEP = (FAILED, *PROMPT_TOKENS, *RATES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "\n       ".join(f"jaxserve bench {name} {words}" for name, (_, words, _, _) in KINDS.items())
    kinds = parser.add_subparsers(dest="kind", metavar="{" + ",".join(KINDS) + "}")
    for name, (summary, words, add_kind_flags, _) in KINDS.items():
        usage = f"jaxserve bench {name} {words}"
        add_kind_flags(kinds.add_parser(name, help=summary, description=summary, usage=usage, allow_abbrev=False))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the figures; returns 1 if a request failed or a server did not start, else 0."""
    if arguments.kind is None:
        raise ConfigError(f"choose what to measure: {', '.join(f'`jaxserve bench {name}`' for name in KINDS)}")
    if arguments.json is not None:
        check_target("--json", Path(arguments.json))
    try:
        runs = KINDS[arguments.kind][-1](arguments)
        if arguments.json is not None:
            _write_json(Path(arguments.json), runs[0] if len(runs) == 1 else {"runs": runs})
    except (BenchmarkError, RemoteError, TokenizeError, StartFailedError) as error:
        print(f"jaxserve bench: {error}", file=sys.stderr)
        return 1
    return 1 if any(figures.get("failed") or figures.get("ended_by") for figures in runs) else 0


def _write_json(file: Path, content: Figures) -> None:
    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"--json {file}: {error.strerror}") from error


def _run_serve(arguments: argparse.Namespace) -> list[Figures]:
    if arguments.plot is not None:
        check_plot(Path(arguments.plot))
    load = Load(
        url=base_url(arguments.url),
        model=arguments.model,
        workload=_workload(arguments),
        backend=arguments.backend,
        endpoint=arguments.endpoint,
        tokenizer=Path(arguments.tokenizer) if arguments.tokenizer else None,
        extra_body=arguments.extra_body,
        num_warmups=arguments.num_warmups,
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        seed=arguments.seed,
        api_key=arguments.api_key or environment_api_key(),
        timeout_s=arguments.timeout,
        keep_alive=arguments.keep_alive,
        percentiles=arguments.metric_percentiles,
        goodput_ms=dict(arguments.goodput or ()),
        save_detailed=arguments.save_detailed,
    )
    runs = asyncio.run(_sweep(load, _levels(arguments.max_concurrency, arguments.num_prompts)))
    print(f"{load.workload.name} on {runs[0]['model_id']} at {load.url}")
    if len(runs) == 1:
        print_run(runs[0], load.percentiles)
    else:
        print_sweep(runs, load.percentiles)
    print_notes(runs)
    if arguments.plot is not None:
        label = arguments.label or runs[0]["model_id"]
        draw({label: runs}, Path(arguments.plot), title=f"{load.workload.name} on {runs[0]['model_id']}")
    return [{"label": arguments.label, **figures} for figures in runs]


async def _sweep(load: Load, levels: Sequence[Level]) -> list[Figures]:
    """Return the figures of each level; if one cannot be measured, those before it, with the reason as `ended_by`."""
    with _progress() as add_bar:
        async with connected(load) as server:
            runs: list[Figures] = []
            for level in levels:
                name: str = load.workload.name
                if level.max_concurrency is not None:
                    name += f", {level.max_concurrency} at a time"
                on_start, on_done = add_bar(name, level.num_prompts)
                try:
                    runs.append(await server.run(level, on_start=on_start, on_done=on_done))
                except (BenchmarkError, RemoteError, TokenizeError, asyncio.CancelledError) as error:
                    if not runs:
                        raise
                    runs[-1]["ended_by"] = str(error) or "interrupted"
                    print(f"jaxserve bench: {name}: {runs[-1]['ended_by']}", file=sys.stderr)
                    break
            return runs


def _run_offline(arguments: argparse.Namespace) -> list[Figures]:
    from jaxserve.tools.bench.offline import OfflineLoad, grammar_of, run_offline  # imports jax

    config = config_from_flags(arguments)
    if config.parallel.replicas > 1:
        raise ConfigError(f"--replicas {config.parallel.replicas}: `jaxserve bench offline` measures one engine (1)")
    grammar = grammar_of(arguments.structured_outputs, config.structured.max_grammar_depth)
    # The variables that a server gives its engine: glibc reads its part at the start.
    restart_with(engine_environment(child_environment()))
    configure_logging(config.server.log_level, config.server.log_format)
    load = OfflineLoad(
        workload=_workload(arguments),
        num_prompts=arguments.num_prompts,
        num_warmups=arguments.num_warmups,
        max_concurrency=arguments.max_concurrency,
        seed=config.model.seed,
        percentiles=arguments.metric_percentiles,
        grammar=grammar,
    )
    with _progress() as add_bar:
        figures = run_offline(config, load, add_bar)
    print(f"{load.workload.name} on {config.model.model}, offline")
    print_run(figures, load.percentiles)
    print_engine(figures)
    print_notes([figures])
    return [{"model_id": config.model.model, **figures}]


def _run_startup(arguments: argparse.Namespace) -> list[Figures]:
    command = [sys.executable, "-m", "jaxserve.cli.internal.child", "serve", *arguments.serve_words]
    try:
        changed = shlex.split(arguments.changed_flags or "")
    except ValueError as error:
        raise ConfigError(f"--changed-flags {arguments.changed_flags!r}: {str(error).lower()}") from None
    figures = measure_startup(
        command,
        num_warm=arguments.num_warm,
        timeout_s=arguments.timeout,
        changed=changed,
        environment=child_environment(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")),
    )
    print_startup(figures)
    return [figures]


Kind = tuple[str, str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], list[Figures]]]
"""Summary, usage, a function that adds the flags, and one that returns the figures of the runs."""
KINDS: Mapping[str, Kind] = {
    "serve": ("load a running server", "[OPTIONS]", add_serve, _run_serve),
    "offline": ("load the engine alone, in this process", "[MODEL] [OPTIONS]", add_offline, _run_offline),
    "startup": ("time `jaxserve serve` until it is ready", "[OPTIONS] [-- SERVE OPTIONS]", add_startup, _run_startup),
}


@contextmanager
def _progress() -> Iterator[Callable[[str, int], tuple[Callable[[], None], Callable[[RequestRecord], None]]]]:
    """Yield a function that adds a bar on stderr; it returns the callbacks for the start and for every finished request."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:

        def add_bar(name: str, total: int) -> tuple[Callable[[], None], Callable[[RequestRecord], None]]:
            task = bars.add_task(name, total=total, start=False)

            def on_done(record: RequestRecord) -> None:
                del record
                bars.advance(task)

            return lambda: bars.start_task(task), on_done

        yield add_bar


def _workload(arguments: argparse.Namespace) -> Workload:
    return make_workload(
        arguments.workload, num_prompt_tokens=arguments.input_len, num_output_tokens=arguments.output_len
    )


def _levels(concurrencies: Sequence[int] | None, counts: Sequence[int]) -> list[Level]:
    """Return one level for each concurrency, with its number of requests."""
    at_a_time: Sequence[int | None] = concurrencies or (None,)
    if len(counts) not in (1, len(at_a_time)):
        raise ConfigError(
            f"--num-prompts has {len(counts)} numbers and --max-concurrency {len(at_a_time)}: give one, or as many"
        )
    counts = counts if len(counts) == len(at_a_time) else [*counts] * len(at_a_time)
    return [
        Level(num_prompts=n, max_concurrency=most, repeat=at_a_time[:i].count(most))
        for i, (n, most) in enumerate(zip(counts, at_a_time, strict=True))
    ]


def make_console() -> Console:
    """Return the console of the tables. In a file or a pipe its lines are long enough for a sweep of 12 levels."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    return console


def print_run(figures: Figures, percentiles: Sequence[float]) -> None:
    """Print the totals and latencies of one run."""
    console = make_console()
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
    make_console().print(table)


def print_notes(runs: Sequence[Figures]) -> None:
    """Print what makes figures incomparable, and the errors."""
    console, notes = make_console(), []
    if omitted := sorted({name for run in runs for name in run.get("omitted_fields", ())}):
        notes.append(f"the server refuses {', '.join(omitted)}: sent without")
    if num_mismatched := sum(run["mismatched_inputs"] for run in runs):
        notes.append(f"the server read another number of tokens than counted here in {num_mismatched} requests")
    if num_short := sum(run["short_outputs"] for run in runs):
        notes.append(f"{num_short} requests ended before the wanted number of tokens: do not compare their throughput")
    if sources := {run.get("output_tokens_from", "usage") for run in runs} - {"usage"}:
        notes.append(f"output tokens were counted by {', '.join(sorted(sources))}: usage was missing")
    for note in notes:
        console.print(note, style="yellow", markup=False)
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
    make_console().print(totals, programs)


def print_startup(figures: Figures) -> None:
    """Print the cold start and the medians of the others."""
    table = Table("start", "answers HTTP (s)", "ready (s)")
    table.add_row("cold", f"{figures['cold_listening_s']:.2f}", f"{figures['cold_ready_s']:.2f}")
    for kind, name in (("warm", "warm"), ("changed", figures.get("changed"))):
        if ready := figures.get(f"{kind}_ready_s"):
            listening = statistics.median(figures[f"{kind}_listening_s"])
            table.add_row(f"{name}, median of {len(ready)}", f"{listening:.2f}", f"{statistics.median(ready):.2f}")
    make_console().print(table)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
