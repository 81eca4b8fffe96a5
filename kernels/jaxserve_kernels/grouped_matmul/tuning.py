"""Sizes of the kernels, per kind of device: data in `tuning/<device>.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve_kernels import tuned_sizes
from jaxserve_kernels.devices import multiprocessors


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Sizes of the kernel for GPUs."""

    rows: int
    """Rows of a tile: 64 or 128."""
    outputs: int
    """Outputs of one of a program's workers."""
    inputs: int
    """Inputs of one step."""
    stages: int
    """Steps in flight."""
    programs: int
    """Thread blocks: as many as there are multiprocessors."""


def grouped_tuning(device: str, bits: int, rows_per_expert: int) -> GroupedTuning:
    """Sizes for weights of so many bits and so many rows of an expert, if all have as many."""
    known = load(device)
    return GroupedTuning(**of_rows(known[f"{bits} bits"], rows_per_expert), programs=multiprocessors(known["programs"]))


def of_rows(table: dict[str, dict[str, int]], rows_per_expert: int) -> dict[str, int]:
    """The sizes for so many rows of an expert; the table says below how many each are."""
    return next(sizes for below, sizes in table.items() if below == "all" or rows_per_expert < int(below))


def load(device: str) -> dict[str, Any]:
    """Return the sizes that are known for a device. Raises FileNotFoundError."""
    return tuned_sizes.load(__package__, device)
