"""Draws latency against throughput: one point per number of concurrent requests, one line per server.

The only module that imports matplotlib, which is an extra (`jaxserve[bench]`).
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.report import check_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
PANELS = {"ttft": "time to first token", "tpot": "time per output token"}
SIZE_INCHES = (10.0, 4.4)
DOTS_PER_INCH = 160
# Okabe and Ito's colours, which colour-blind readers can distinguish, also in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK = "#333333"
LOG_SCALE_RATIO = 20.0
"""Ratio of the highest to the lowest value from which the axis is logarithmic."""
HEADROOM = 1.08
FOOTROOM = 1.4
"""Space for the number below the lowest point."""


def check_plot(file: Path) -> None:
    """Raise ConfigError if `draw` would fail."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'jaxserve[bench]'")
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {file}: expected a name that ends in {', '.join(SUFFIXES)}")
    check_target("--plot", file)


def draw(series: Mapping[str, Sequence[Mapping[str, Any]]], file: Path, *, title: str) -> None:
    """Write the picture of `series`: figures of `report.summarise` by the name of the server they belong to.

    Solid: median. Dashed: the highest percentile that was reported. Runs without a completed request are left out.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout=ConstrainedLayoutEngine(wspace=0.06))
    panels = figure.subplots(1, len(PANELS), squeeze=False)[0]
    for axes, (latency, name) in zip(panels, PANELS.items(), strict=True):
        heights: list[float] = []
        for (label, runs), colour in zip(series.items(), itertools.cycle(COLOURS)):
            heights += _draw_line(axes, label, runs, latency, colour)
        _dress(axes, name, heights)
    figure.suptitle(title, color=INK, fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.savefig(file)


def _draw_line(axes: Axes, label: str, runs: Sequence[Mapping[str, Any]], latency: str, colour: str) -> list[float]:
    """Draw one server; returns the heights of its points."""
    shown = [run for run in runs if run[f"median_{latency}_ms"] is not None]
    if not shown:
        return []
    throughput: list[float] = [run["output_throughput"] for run in shown]
    median: list[float] = [run[f"median_{latency}_ms"] for run in shown]
    axes.plot(throughput, median, color=colour, marker="o", markersize=5, label=f"{label}, median")
    heights = list(median)
    if tail := _highest_percentile(shown[0], latency):
        values: list[float] = [run[f"{tail}_{latency}_ms"] for run in shown]
        heights += values
        axes.plot(throughput, values, color=colour, linestyle="--", linewidth=1, alpha=0.7, label=f"{label}, {tail}")
    for run, x, y in zip(shown, throughput, median, strict=True):
        text = "all" if run["max_concurrency"] is None else str(run["max_concurrency"])
        axes.annotate(text, (x, y), xytext=(5, -11), textcoords="offset points", color=colour, fontsize=9)
    return heights


def _dress(axes: Axes, name: str, heights: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xlabel("output tokens/s   (numbers: requests at a time)", color=INK)
    axes.set_ylabel(f"{name} (ms)", color=INK)
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    if heights and max(heights) > LOG_SCALE_RATIO * min(heights):
        axes.set_yscale("log")
        axes.set_ylim(bottom=min(heights) / FOOTROOM)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:,.0f}")
    elif heights:
        axes.set_ylim(0, max(heights) * HEADROOM)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def _highest_percentile(run: Mapping[str, Any], latency: str) -> str | None:
    """Return the highest percentile above the median: `p99` from the key `p99_ttft_ms`."""
    names = [key.split("_")[0] for key in run if key.startswith("p") and key.endswith(f"_{latency}_ms")]
    highest = max(names, key=lambda name: float(name[1:]), default=None)
    return highest if highest is not None and float(highest[1:]) > 50 else None
