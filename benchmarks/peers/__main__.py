"""`python -m benchmarks.peers`: installs the peers, runs them beside jaxserve, writes JSON and a Markdown page."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.bounds import BoundsError, MachineBounds, best_of, measure_bounds, model_sizes
from benchmarks.peers.environment import last_error, peers_folder
from benchmarks.peers.jaxserve_server import Jaxserve
from benchmarks.peers.llama_server import LlamaServer
from benchmarks.peers.load import DEFAULT_CONCURRENCY, make_cells
from benchmarks.peers.peer import Entrant, Peer, PeerUnavailableError, parse_entrant
from benchmarks.peers.ratios import compare
from benchmarks.peers.rounds import Pairing, Plan, run_pairing
from benchmarks.peers.table import hide_folders, report
from benchmarks.peers.transformers_server import TransformersServer
from benchmarks.peers.vllm_server import VLLMServer
from benchmarks.peers.weights import Weights, WeightsError, weights_of
from benchmarks.processes import describe_machine
from jaxserve.errors import CheckpointError, StartupError
from jaxserve.runtime.environment import default_model
from jaxserve.tools.planning.sizes import Sizes

DEFAULT_PEERS = ("llama-server:f32", "vllm:f32", "transformers:f32")
DEFAULT_WORKLOADS = ("chat", "prefix", "prefill")


def make_peers(root: Path) -> dict[str, Peer]:
    """Every peer by name, each with its own folder in `root`."""
    peers: list[Peer] = [
        LlamaServer(root / "llama-server"),
        VLLMServer(root / "vllm"),
        TransformersServer(root / "transformers"),
    ]
    return {peer.name: peer for peer in peers}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--peers",
        nargs="+",
        default=list(DEFAULT_PEERS),
        metavar="NAME[:FORMAT]",
        help=f"whom to run beside jaxserve (default: {' '.join(DEFAULT_PEERS)})",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=DEFAULT_CONCURRENCY,
        default=list(DEFAULT_WORKLOADS),
        help="default: %(default)s",
    )
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=_positive,
        metavar="N",
        help="streams (default: chat 1 4 16 32, prefix 16, prefill 4, long 1)",
    )
    parser.add_argument(
        "--num-prompts", type=_positive, metavar="N", help="requests of a cell (default: by workload and streams)"
    )
    parser.add_argument("--rounds", type=_positive, default=3, metavar="N", help="turns of each server (default: 3)")
    parser.add_argument(
        "--jaxserve-args",
        default="",
        metavar="WORDS",
        help='more words for `jaxserve serve`: --jaxserve-args="--block-size 32"',
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file or a folder (default: SmolLM2-135M-Instruct of its package)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument(
        "--envs",
        type=Path,
        default=peers_folder(),
        metavar="DIR",
        help="where peers are installed (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/bench-peers/DATE")
    parser.add_argument("--start-timeout", type=float, default=900.0, metavar="SECONDS", help="default: 900")
    parser.add_argument("--cell-timeout", type=float, default=1800.0, metavar="SECONDS", help="default: 1800")
    parser.add_argument("--install-only", action="store_true", help="install the peers, make their weights, and stop")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0 when every peer gave figures, 1 when one did not, 2 for a mistake in the command."""
    arguments = make_parser().parse_args(words)
    try:
        peers = make_peers(arguments.envs)
        entrants = [parse_entrant(text, peers) for text in arguments.peers]
        source = arguments.model or default_model()
        sizes = model_sizes(source)
    except (ValueError, StartupError) as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 2
    weights = weights_of(source, arguments.envs)
    ready, skipped = install(entrants, weights)
    if arguments.install_only or not ready:
        return 1 if skipped else 0
    plan = Plan(
        weights=weights,
        cells=make_cells(arguments.workloads, arguments.concurrency, arguments.num_prompts),
        num_rounds=arguments.rounds,
        seed=arguments.seed,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        folder=(arguments.out or Path("build/bench-peers") / time.strftime("%Y%m%d-%H%M%S")).resolve(),
        start_timeout_s=arguments.start_timeout,
        cell_timeout_s=arguments.cell_timeout,
    )
    plan.folder.mkdir(parents=True, exist_ok=True)
    # Servers are stopped on the way out, also when `timeout` or a supervisor ends this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        pairings, page = _run(plan, ready, skipped, sizes, arguments)
    except BoundsError as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 1
    print(page)
    say(f"written to {plan.folder}")
    return 1 if skipped or any(pairing.problem for pairing in pairings) else 0


def _run(
    plan: Plan,
    entrants: Sequence[Entrant],
    skipped: Mapping[str, str],
    sizes: Sizes,
    arguments: argparse.Namespace,
) -> tuple[list[Pairing], str]:
    """All pairings and the page of them, which is written after every peer: a run broken off has shown what it had."""
    ours = Entrant(Jaxserve(shlex.split(arguments.jaxserve_args)), "f32")
    versions = {each.label: each.peer.versions() for each in [ours, *entrants]}
    names = {
        plan.folder: "OUT",
        plan.weights.folder: "WEIGHTS",
        arguments.envs: "ENVS",
        plan.weights.source.parent: "MODEL",
        Path(sys.prefix): "VENV",
    }
    bounds = measure_bounds(sizes.read_bytes)
    pairings: list[Pairing] = []
    for entrant in entrants:
        pairings.append(run_pairing(ours, entrant, plan, say))
        bounds = best_of(bounds, measure_bounds(sizes.read_bytes))
        page = report(
            machine=describe_machine(),
            versions=versions,
            pairings=pairings,
            skipped=skipped,
            bounds=bounds,
            sizes=sizes,
            ours=ours.label,
        )
        everything = as_json(pairings, versions, bounds, skipped, ours.label)
        page = hide_folders(page, names)
        (plan.folder / "results.md").write_text(page, encoding="utf-8")
        (plan.folder / "results.json").write_text(hide_folders(everything, names), encoding="utf-8")
    return pairings, page


def install(entrants: Sequence[Entrant], weights: Weights) -> tuple[list[Entrant], dict[str, str]]:
    """Return the peers that can run here, and the reasons of the others."""
    ready, skipped = [], {}
    for entrant in entrants:
        started_s = time.perf_counter()
        say(f"{entrant.label}: installing, where that is missing")
        try:
            entrant.peer.install()
            entrant.peer.prepare(weights, entrant.format_name)
        except (PeerUnavailableError, WeightsError, CheckpointError, OSError) as error:
            skipped[entrant.label] = last_error(str(error))
            say(f"{entrant.label}: skipped: {skipped[entrant.label]}")
        else:
            ready.append(entrant)
            say(f"{entrant.label}: installed in {time.perf_counter() - started_s:.0f} s")
    return ready, skipped


def as_json(
    pairings: Sequence[Pairing],
    versions: Mapping[str, Mapping[str, str]],
    bounds: MachineBounds,
    skipped: Mapping[str, str],
    ours: str,
) -> str:
    """Everything the page is made of, every sample included."""
    everything = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": describe_machine(),
        "versions": versions,
        "bounds": dataclasses.asdict(bounds),
        "skipped": skipped,
        "pairings": [
            dataclasses.asdict(pairing)
            | {
                "comparisons": [
                    dataclasses.asdict(each) for each in compare(pairing.samples, ours=ours, peer=pairing.peer)
                ]
            }
            for pairing in pairings
        ],
    }
    return json.dumps(everything, indent=1) + "\n"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
