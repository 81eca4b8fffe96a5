"""The picture of a soak: memory, descriptors and threads of every process over time, and the kills."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.soak.processes import Role, Usage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES: Final = (9.6, 7.2)
DOTS_PER_INCH: Final = 110
COLOURS: Final[dict[Role, str]] = {"supervisor": "#4c78a8", "api": "#f58518", "engine": "#54a24b"}
LABELS: Final[dict[Role, str]] = {"supervisor": "first API process", "api": "second API process", "engine": "engine"}


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes at one time."""

    time_s: float
    """Since the traffic began."""
    usages: Sequence[Usage]
    num_running: float
    """Requests that run."""


@dataclass(slots=True)
class Kill:
    """A process that was killed."""

    time_s: float
    role: Role
    back_s: float = math.inf
    """When the server was whole again."""


def draw(samples: Sequence[Sample], kills: Sequence[Kill], file: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(4, 1, sharex=True)
    rows: list[tuple[str, Callable[[Usage], float]]] = [
        ("resident memory, MiB", lambda usage: usage.resident_bytes / (1 << 20)),
        ("file descriptors", lambda usage: usage.num_descriptors),
        ("threads", lambda usage: usage.num_threads),
    ]
    for axes, (title, value) in zip(panels, rows, strict=False):
        _draw_processes(axes, samples, value)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
    running = panels[-1]
    running.plot([s.time_s / 60 for s in samples], [s.num_running for s in samples], color="#777777", linewidth=0.8)
    running.set_ylabel("running requests")
    running.set_xlabel("minutes; dashed lines: a process was killed")
    for axes in panels:
        axes.grid(visible=True, alpha=0.3)
        for kill in kills:
            axes.axvline(kill.time_s / 60, color=COLOURS[kill.role], linestyle="--", linewidth=0.8, alpha=0.7)
    panels[0].legend(frameon=False, ncols=3, loc="lower right")
    figure.savefig(file)


def _draw_processes(axes: Axes, samples: Sequence[Sample], value: Callable[[Usage], float]) -> None:
    lines: dict[tuple[Role, int], list[tuple[float, float]]] = {}
    for sample in samples:
        for usage in sample.usages:
            lines.setdefault((usage.role, usage.pid), []).append((sample.time_s / 60, value(usage)))
    named = set[Role]()
    for (role, _), points in lines.items():
        label = None if role in named else LABELS[role]
        named.add(role)
        axes.plot(*zip(*points, strict=True), color=COLOURS[role], label=label, linewidth=1.2)
