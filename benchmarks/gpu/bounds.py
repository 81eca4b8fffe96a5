"""Finds the rates that figures are set against: measured by the first part, or on the device's data sheet."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Sequence

from benchmarks.gpu.context import MEASURED, Bounds
from benchmarks.gpu.records import Record
from jaxserve.tools.planning.devices import ACCELERATORS, Device

TABLE = "bounds"
"""Table of the first part whose rows are rates."""


def find_bounds(records: Sequence[Record], sheet: Device | None) -> Bounds | None:
    """Return the best copy and the best matmul that were measured, each with its data sheet's rate in its place.

    None if one of them is known from neither.
    """
    rates: dict[str, float] = {}
    for record in records:
        if record.kind == "figure" and record.name == TABLE:
            name, rate = str(record.values["bound"]), record.values["rate"]
            rates[name] = max(rates.get(name, 0.0), float(rate or 0.0))
    published = None if sheet is None else sheet.rates
    copy, matmul = rates.get("copy", 0.0) * 1e9, rates.get("matmul", 0.0) * 1e12
    listed = None if published is None else published.source
    sources = [MEASURED if rate else listed for rate in (copy, matmul)]
    copy = copy or (published.bytes_per_s if published else 0.0)
    matmul = matmul or (published.bfloat16_flops if published else 0.0)
    if sources[0] is None or sources[1] is None:
        return None
    return Bounds(copy, matmul, sources[0], sources[1])


def find_sheet(name: str | None, records: Sequence[Record]) -> Device | None:
    """Return the row of the planner's table: the named one, or that of the device the first part or the driver found."""
    if name is not None:
        return ACCELERATORS[name]
    kinds = [
        str(record.values.get("kind")) for record in records if record.kind == "figure" and record.name == "device"
    ]
    words = re.findall(r"[a-z0-9]+", " ".join(kinds or [driver_name() or ""]).lower())
    names = {*words, *map("".join, itertools.pairwise(words))}  # "A100-SXM4-80GB", "RTX 4090"
    return next((device for key, device in ACCELERATORS.items() if device.cuda is not None and key in names), None)


def driver_name() -> str | None:
    """Return the first GPU's name from the driver's own tool; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None
