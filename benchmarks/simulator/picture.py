"""Draws results of `run --out`, one column for each trace: lines over the offered rate, or bars if there is one rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulator.figures import Figures
from jaxserve.tools.bench.plot import COLOURS, DOTS_PER_INCH, INK, LOG_SCALE_RATIO

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORDER = ("round-robin", "least-tokens", "text-prefix", "prefix")
LABELS = {
    "round-robin": "round robin",
    "least-tokens": "least tokens",
    "text-prefix": "text prefix (as Ray's)",
    "prefix": "exact pages",
}
MARKERS = dict(zip(ORDER, "o^sD", strict=True))

Value = Callable[[Figures], float]
ROWS: dict[str, Value] = {
    "prompt tokens\nfrom cache, %": lambda figures: 100 * figures.hit_rate,
    "TTFT p50, ms": lambda figures: 1000 * figures.ttft_p50_s,
    "TTFT p99, ms": lambda figures: 1000 * figures.ttft_p99_s,
    "output tokens/s\nof a replica": lambda figures: figures.output_tokens_per_s,
    "requests of the fullest\nreplica / mean": lambda figures: figures.requests_max_over_mean,
}
"""Figures by the name of their axis."""


def draw(runs: Sequence[Figures], file: Path, *, title: str) -> None:
    """Write the picture of `runs`, whose name ends in .png, .svg or .pdf."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    traces = list(dict.fromkeys(run.workload for run in runs))
    figure = Figure(
        figsize=(1.0 + 3.1 * len(traces), 0.9 + 1.6 * len(ROWS)),
        dpi=DOTS_PER_INCH,
        layout=ConstrainedLayoutEngine(hspace=0.03, wspace=0.04),
    )
    grid = figure.subplots(len(ROWS), len(traces), squeeze=False, sharex="col")
    for row, (name, value) in enumerate(ROWS.items()):
        for column, trace in enumerate(traces):
            axes = grid[row][column]
            own = [run for run in runs if run.workload == trace]
            is_single = len({run.requests_per_s for run in own}) == 1
            (_draw_bars if is_single else _draw_lines)(axes, own, value)
            heights = [value(run) for run in own]
            _dress(axes, is_log=max(heights) > LOG_SCALE_RATIO * max(min(heights), 1e-9) and min(heights) > 0)
            if row == 0:
                axes.set_title(trace, color=INK, fontsize=11)
            if column == 0:
                axes.set_ylabel(name, color=INK, fontsize=9)
            if row == len(ROWS) - 1:
                axes.set_xlabel("" if is_single else "offered requests/s for each replica", color=INK, fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10)
    figure.suptitle(title, color=INK, fontsize=12)
    figure.savefig(file)


def _draw_lines(axes: Axes, runs: Sequence[Figures], value: Value) -> None:
    for policy, colour in zip(ORDER, COLOURS, strict=False):
        points = sorted((run.requests_per_s, value(run)) for run in runs if run.policy == policy)
        if points:
            rates, values = zip(*points, strict=True)
            axes.plot(
                rates, values, color=colour, marker=MARKERS[policy], markersize=5, linewidth=1.6, label=LABELS[policy]
            )


def _draw_bars(axes: Axes, runs: Sequence[Figures], value: Value) -> None:
    for place, (policy, colour) in enumerate(zip(ORDER, COLOURS, strict=False)):
        heights = [value(run) for run in runs if run.policy == policy]
        bars = axes.bar([place] * len(heights), heights, color=colour, width=0.7, label=LABELS[policy])
        axes.bar_label(
            bars,
            fmt=lambda height: f"{height:,.0f}" if height >= 100 else f"{height:.3g}",
            fontsize=8,
            color=INK,
            padding=1,
        )
    axes.set_xticks([])
    axes.margins(y=0.15)


def _dress(axes: Axes, *, is_log: bool) -> None:
    if is_log:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.0f}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.grid(color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
