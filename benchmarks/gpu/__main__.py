"""`python -m benchmarks.gpu`: checks and measures jaxserve on this machine's GPU, in under nine minutes.

Every part runs in a process of its own with a time limit; what one does not use, later ones may. Results are
written after every part. Exit code 1 when a check failed or a part of checks did not end, 2 for a mistake in the command.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.bounds import find_bounds, find_sheet
from benchmarks.gpu.context import Bounds
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.plots import can_draw, draw_all
from benchmarks.gpu.processes import ROOT, Orders, Outcome, PartInterruptedError, make_environment, run_part
from benchmarks.gpu.report import as_json, as_markdown
from benchmarks.gpu.sensors import watched_device
from benchmarks.peers.jaxserve_server import source_commit
from jaxserve.tools.planning.devices import ACCELERATORS

WHEELS = ROOT / ".gpu-wheels"
ARCHIVE = "results.tar.gz"
BOUNDS_PART = PARTS[0]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False)
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}; {names[0]} always runs"
    )
    parser.add_argument(
        "--attention-backend",
        choices=("auto", "reference"),
        default="auto",
        help="reference: leave our own kernels out, as where they fail (default: auto, what the server would take)",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seed", type=int, metavar="N", help="of all random inputs (default: drawn, and printed)")
    parser.add_argument(
        "--commit",
        metavar="ID",
        help="commit of this source tree, for the results (default: asked of git, where there is a repository)",
    )
    parser.add_argument(
        "--data-sheet",
        choices=[name for name, device in ACCELERATORS.items() if device.cuda is not None],
        help="published rates in place of bounds that could not be measured (default: by the device's name)",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="packages this machine lacks, as `make gpu-wheels` gets them (default: .gpu-wheels, where it exists)",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(words)
    wheels = arguments.wheels or (WHEELS if WHEELS.is_dir() else None)
    if wheels is not None and not wheels.is_dir():
        print(f"gpu-check: --wheels {wheels}: no such folder", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxserve-gpu-check-") as folder:
        orders = Orders(
            platform=arguments.platform,
            is_quick=arguments.quick,
            seed=seed,
            attention_backend=arguments.attention_backend,
            folder=Path(folder),
            results=out,
            environment=make_environment(arguments.platform, wheels, Path(folder)),
            log=log,
        )
        heading = make_heading(orders, arguments.commit)
        outcomes = run_all(
            [part for part in PARTS if _is_wanted(part, arguments.only)], orders, heading, arguments.data_sheet
        )
    if can_draw():
        draw_all(outcomes, out)
        archive(out)
    print((out / "results.md").read_text(encoding="utf-8"))
    say(f"written to {arguments.out}")
    return 0 if all(outcome.is_right for outcome in outcomes if outcome.part.is_check) else 1


def make_heading(orders: Orders, commit: str | None) -> dict[str, Any]:
    """Return what the results say of the whole run."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit or source_commit(),
        "platform": orders.platform,
        "seed": orders.seed,
        "attention backend": orders.attention_backend,
        "sizes": "quick" if orders.is_quick else "full",
        "pictures": "drawn" if can_draw() else "none, matplotlib is not installed",
    }


def run_all(
    parts: Sequence[Part], orders: Orders, heading: Mapping[str, Any], data_sheet: str | None = None
) -> list[Outcome]:
    """Run one part after the other; all results are written after each, so that a run broken off leaves what it had."""
    say(f"seed {orders.seed}")
    outcomes: list[Outcome] = []
    found, bounds, spare_s = dict(heading), None, 0.0
    with watched_device() as sensors:
        for part in parts:
            limit_s, started_s = part.budget_s + spare_s, time.monotonic()
            outcome, is_interrupted = _run(part, limit_s, orders, bounds)
            spare_s = max(0.0, limit_s - outcome.seconds)
            if part.name == BOUNDS_PART.name:
                bounds = find_bounds(outcome.records, find_sheet(data_sheet, outcome.records))
                found["bounds"] = "none" if bounds is None else bounds.label
            load = sensors.summary(part.name, started_s)
            outcomes.append(outcome if load is None else replace(outcome, records=[*outcome.records, load]))
            say(_line(outcome))
            (orders.results / "results.json").write_text(as_json(found, outcomes), encoding="utf-8")
            (orders.results / "results.md").write_text(as_markdown(found, outcomes), encoding="utf-8")
            archive(orders.results)
            if is_interrupted:
                say("interrupted: the parts after it were not begun")
                break
    return outcomes


def _run(part: Part, limit_s: float, orders: Orders, bounds: Bounds | None) -> tuple[Outcome, bool]:
    """Return the outcome of a part, and True if someone interrupted it."""
    try:
        return run_part(part, limit_s, orders, bounds), False
    except PartInterruptedError as interruption:
        return interruption.outcome, True


def archive(out: Path) -> None:
    """Put all results into one file: some ways to fetch them take few files, and no deep folders."""
    whole = out / ARCHIVE
    with tarfile.open(whole.with_suffix(".part"), "w:gz") as file:
        for each in sorted(out.iterdir()):
            if each.suffix != ".part" and each != whole:
                file.add(each, each.name)
    whole.with_suffix(".part").replace(whole)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _is_wanted(part: Part, only: Sequence[str] | None) -> bool:
    return part is BOUNDS_PART or (part.is_default if only is None else part.name in only)


def _line(outcome: Outcome) -> str:
    checks = [record for record in outcome.records if record.kind == "check"]
    problems = [f"{record.name}: {record.text}" for record in outcome.records if record.kind == "problem"]
    failed = [record.name for record in checks if not record.passed]
    text = f"{outcome.part.name}: {outcome.status} after {outcome.seconds:.0f} s"
    if checks:
        text += f", {len(checks) - len(failed)} of {len(checks)} checks passed"
    return "\n".join([text, *(f"  failed: {name}" for name in failed), *(f"  {problem}" for problem in problems)])


if __name__ == "__main__":
    # Parts are stopped on the way out, also when `timeout` or a supervisor ends this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
