"""`python -m benchmarks.simulator`: simulates a fleet, compares policies, makes tables of step times, draws results."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.simulator.cell import CellSettings
from benchmarks.simulator.figures import Figures, as_markdown, figures_of
from benchmarks.simulator.fleet import FleetSettings, run_fleet
from benchmarks.simulator.picture import draw
from benchmarks.simulator.step_times import TABLES, load_table, save_table
from benchmarks.simulator.validate import as_markdown as compared
from benchmarks.simulator.validate import compare
from benchmarks.simulator.workloads import WORKLOADS
from jaxserve.config import SchedulerConfig
from jaxserve.errors import ConfigError, StartupError
from jaxserve.routing.router import POLICY_NAMES, PolicyName
from jaxserve.tools.bench.plot import check_plot

ROUTINGS: tuple[PolicyName, ...] = ("round-robin", "least-tokens", "prefix")
"""Policies of `jaxserve serve`."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="simulate, print a table, append figures to a JSON Lines file")
    run.add_argument(
        "--table", default="v6e-llama-8b", metavar="NAME", help=f"step times, from {TABLES.name}/ or a path"
    )
    run.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["sharegpt"], help="default: %(default)s")
    run.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=list(POLICY_NAMES), help="default: all")
    run.add_argument("--replicas", type=_positive, default=100, help="of the whole fleet (default: %(default)s)")
    run.add_argument("--routers", type=_positive, default=1, help="each has an equal part of the replicas (default: 1)")
    run.add_argument("--requests", type=_positive, default=10_000, help="default: %(default)s")
    run.add_argument(
        "--rates", nargs="+", type=float, default=[8.0], metavar="R", help="requests a second for each replica"
    )
    run.add_argument("--max-imbalance-tokens", type=_positive, metavar="N", help="bound of the policy `prefix`")
    run.add_argument("--max-queued-requests", type=int, default=1024, help="of each replica (default: %(default)s)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--processes", type=_positive, default=len(os.sched_getaffinity(0)), help="default: all cores")
    run.add_argument("--every-step", action="store_true", help="skip no steps: slower, for comparison")
    run.add_argument("--out", type=Path, metavar="FILE", help="JSON Lines file to append figures to")
    tables = commands.add_parser("estimate", help="write a table of step times by arithmetic")
    tables.add_argument("name", help="name of the table")
    tables.add_argument("--device", required=True, help="as `jaxserve plan --device`")
    tables.add_argument("--devices", type=_positive, default=1, help="tensor parallel (default: 1)")
    tables.add_argument("--block-size", type=_positive, default=64, help="tokens per page (default: %(default)s)")
    measured = commands.add_parser("measure", help="measure a table of step times: the default model on this machine")
    measured.add_argument("name", help="name of the table")
    measured.add_argument("--title", required=True, help="model, device and number of cores")
    check = commands.add_parser("validate", help="compare with `jaxserve serve --replicas 4` over a fake executor")
    check.add_argument("--policies", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), help="default: all")
    check.add_argument("--rate", type=float, default=3.0, help="requests a second (default: %(default)s)")
    check.add_argument("--requests", type=_positive, default=300, help="default: %(default)s")
    check.add_argument("--seed", type=int, default=0)
    plot = commands.add_parser("plot", help="draw the figures of `run --out`")
    plot.add_argument("file", type=Path, metavar="OUT", help=".png, .svg or .pdf")
    plot.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="JSON Lines files")
    plot.add_argument("--title", default="")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 for a mistake in the command."""
    arguments = make_parser().parse_args(words)
    try:
        match arguments.command:
            case "run":
                _run(arguments)
            case "estimate":
                _estimate(arguments)
            case "measure":
                _measure(arguments)
            case "validate":
                _validate(arguments)
            case "plot":
                _plot(arguments)
    except (ConfigError, StartupError, FileNotFoundError, msgspec.ValidationError) as error:
        print(f"simulator: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    if arguments.replicas % arguments.routers:
        raise ConfigError(f"--replicas {arguments.replicas} do not divide among --routers {arguments.routers}")
    cell = CellSettings(
        table=load_table(arguments.table),
        policy=arguments.policies[0],
        num_replicas=arguments.replicas // arguments.routers,
        scheduler=SchedulerConfig(max_queued_requests=arguments.max_queued_requests),
        max_imbalance_tokens=arguments.max_imbalance_tokens,
        skips=not arguments.every_step,
    )
    rows = []
    for workload in arguments.workloads:
        for rate in arguments.rates:
            for policy in arguments.policies:
                settings = FleetSettings(
                    cell=replace(cell, policy=policy),
                    num_cells=arguments.routers,
                    workload=workload,
                    requests_per_s=rate * arguments.replicas,
                    num_requests=arguments.requests,
                    seed=arguments.seed,
                )
                rows.append(_simulate(settings, min(arguments.processes, arguments.routers)))
                if arguments.out is not None:
                    with arguments.out.open("ab") as file:
                        file.write(msgspec.json.encode(rows[-1]) + b"\n")
    print(as_markdown(rows), end="")


def _simulate(settings: FleetSettings, num_processes: int) -> Figures:
    started_s, num_done = time.perf_counter(), 0

    def show() -> None:
        nonlocal num_done
        num_done += 1
        print(
            f"{settings.workload} {settings.cell.policy}: {num_done} of {settings.num_cells} routers, "
            f"{time.perf_counter() - started_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    records = run_fleet(settings, num_processes=num_processes, on_cell=show)
    return figures_of(settings, records, time.perf_counter() - started_s)


def _estimate(arguments: argparse.Namespace) -> None:
    from benchmarks.simulator.estimate import estimate  # here, since it imports jax, which no simulation needs

    path = TABLES / f"{arguments.name}.json"
    save_table(estimate(arguments.device, num_devices=arguments.devices, block_size=arguments.block_size), path)
    print(f"written to {path}")


def _measure(arguments: argparse.Namespace) -> None:
    from benchmarks.simulator.measure import default_config, measure

    path = TABLES / f"{arguments.name}.json"
    save_table(measure(default_config(), title=arguments.title), path)
    print(f"written to {path}")


def _validate(arguments: argparse.Namespace) -> None:
    comparisons = compare(
        arguments.policies, requests_per_s=arguments.rate, num_requests=arguments.requests, seed=arguments.seed
    )
    print(compared(comparisons), end="")


def _plot(arguments: argparse.Namespace) -> None:
    check_plot(arguments.file)
    lines = [line for file in arguments.runs for line in file.read_bytes().splitlines()]
    draw([msgspec.json.decode(line, type=Figures) for line in lines], arguments.file, title=arguments.title)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
