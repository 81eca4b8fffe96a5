"""Draws runs of `python -m benchmarks.peers`: `python -m benchmarks.peers.picture OUT.png RESULTS.json[=LABEL] ...`.

One line for every server of every run, one point for every number of streams of the chat workload, medians over the
rounds. LABEL says what jaxserve was started with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.plot import check_plot, draw

WORKLOAD = "chat"
OURS = "jaxserve"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.picture", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help=".png, .svg or .pdf")
    parser.add_argument("results", nargs="+", metavar="RESULTS.json[=LABEL]")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args(argv)
    try:
        check_plot(arguments.out)
    except ConfigError as error:
        parser.error(str(error))
    series: dict[str, list[dict[str, Any]]] = {}
    for result in arguments.results:
        file, _, label = result.partition("=")
        series |= lines(json.loads(Path(file).read_text(encoding="utf-8")), label)
    draw(series, arguments.out, title=arguments.title)
    return 0


def lines(run: Mapping[str, Any], label: str) -> dict[str, list[dict[str, Any]]]:
    """Figures by server, in the order of their streams."""
    cells: dict[str, dict[int, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for pairing in run["pairings"]:
        for sample in pairing["samples"]:
            if sample["cell"]["workload"] == WORKLOAD and sample["round"] >= 0:
                name = f"{OURS} {label}".strip() if sample["server"] == OURS else sample["server"]
                cells[name][sample["cell"]["concurrency"]].append(sample["figures"])
    return {name: [_median(by_streams[n]) for n in sorted(by_streams)] for name, by_streams in cells.items()}


def _median(rounds: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The rounds' figures as one; what is not a number is the first round's."""
    return {
        key: statistics.median(each[key] for each in rounds) if isinstance(first, float) else first
        for key, first in rounds[0].items()
    }


if __name__ == "__main__":
    sys.exit(main())
