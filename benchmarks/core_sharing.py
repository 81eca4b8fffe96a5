"""Who should get which core: `python benchmarks/core_sharing.py [MODEL]`.

One `jaxserve serve` with the real engine; its processes are moved among cores and priorities while it runs, and
the same streams are measured under each arrangement, interleaved, so that whatever else the machine does hits
all of them. Needs the right to lower nice values (root) and an otherwise idle machine to say anything.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from api_process import STOP_TIMEOUT_S, api_workers, measure, ready_port

ALL_CORES = os.sched_getaffinity(0)
FIRST = {min(ALL_CORES)}
OTHERS = ALL_CORES - FIRST or ALL_CORES


@dataclass(frozen=True)
class Arrangement:
    """Cores and nice values of the API process and of the engine."""

    name: str
    api_cores: set[int]
    api_nice: int
    engine_cores: set[int]
    engine_nice: int


ARRANGEMENTS = (
    Arrangement("as it is", ALL_CORES, 0, ALL_CORES, 0),
    Arrangement("engine yields (nice 5)", ALL_CORES, 0, ALL_CORES, 5),
    Arrangement("API yields (nice 5)", ALL_CORES, 5, ALL_CORES, 0),
    Arrangement("API on one core, engine on all", FIRST, 0, ALL_CORES, 0),
    Arrangement("API on one core, engine on the others", FIRST, 0, OTHERS, 0),
)


def arrange(api_pid: int, engine_pid: int, arrangement: Arrangement) -> None:
    """Move all threads of both."""
    apply(api_pid, lambda thread: os.sched_setaffinity(thread, arrangement.api_cores), arrangement.api_nice)
    apply(engine_pid, lambda thread: os.sched_setaffinity(thread, arrangement.engine_cores), arrangement.engine_nice)


def apply(pid: int, move: Callable[[int], None], nice: int) -> None:
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        move(thread)
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def engine_of(pid: int) -> int:
    """The engine process of a server."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return next(child for child in children if child not in api_workers(pid))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: that of `jaxserve serve`")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--tokens", type=int, default=64, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", *filter(None, [options.model]), "--port", "0"]
    with subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True) as process:
        try:
            port = ready_port(process)
            for num_streams in options.streams:
                compare(port, process.pid, num_streams, options)
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
    return 0


def compare(port: int, api_pid: int, num_streams: int, options: argparse.Namespace) -> None:
    """All arrangements in turn, `--rounds` times; one line each."""
    engine_pid = engine_of(api_pid)
    rates: dict[str, list[float]] = {arrangement.name: [] for arrangement in ARRANGEMENTS}
    for _ in range(options.rounds):
        for arrangement in ARRANGEMENTS:
            arrange(api_pid, engine_pid, arrangement)
            figures = asyncio.run(measure(port, [api_pid], num_streams, options.tokens))
            rates[arrangement.name].append(figures["chunks_per_second"])
    for name, values in rates.items():
        ratio = statistics.median(one / base for one, base in zip(values, rates["as it is"], strict=True))
        print(f"{num_streams:3} streams  {name:38} {statistics.median(values):7.1f} chunks/s  {ratio:5.2f}x")


if __name__ == "__main__":
    sys.exit(main())
