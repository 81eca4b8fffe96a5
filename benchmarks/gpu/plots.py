"""Two pictures: how near decode attention and whole decode steps come to their bounds. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.records import Value
from jaxserve.tools.bench.plot import COLOURS

PICTURES = {
    "decode attention, one layer": ("decode-attention.png", "of_copy", "share of the measured copy bandwidth"),
    "decode steps": ("decode-steps.png", "of_bound", "share of the measured bound"),
}
"""By table: file, column, what the column is."""


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw_all(outcomes: Sequence[Outcome], folder: Path) -> None:
    """A file for each picture that has figures."""
    for table, (file, column, label) in PICTURES.items():
        rows = [
            record.values
            for outcome in outcomes
            for record in outcome.records
            if record.kind == "figure" and record.name == table and record.values.get(column) is not None
        ]
        if rows:
            _draw(rows, column, table, label, folder / file)


def _draw(rows: Sequence[Mapping[str, Value]], column: str, title: str, label: str, file: Path) -> None:
    """A line for every context, over the batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    axes: Any = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        name = ", ".join(str(row[key]) for key in ("model", "context") if row.get(key) is not None)
        lines.setdefault(name, []).append((int(row["batch"] or 0), float(row[column] or 0.0)))
    for index, (name, points) in enumerate(lines.items()):
        points.sort()
        axes.plot(*zip(*points, strict=True), marker="o", color=COLOURS[index % len(COLOURS)], label=name)
    axes.set_xscale("log", base=2)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of the batch")
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(title="context" if "model" not in rows[0] else "model, context")
    figure.savefig(file)
