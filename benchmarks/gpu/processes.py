"""Runs a part as a process group with a time limit, and makes the environment all parts share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from benchmarks.gpu.context import Bounds, Platform
from benchmarks.gpu.parts import Part
from benchmarks.gpu.records import Record, read_records
from jaxserve.config import AttentionBackend

ROOT = Path(__file__).parents[2]
MEMORY_SHARE = "0.92"
"""Fraction of the device's memory for JAX: its default of 0.75 is too little for the largest batches."""

Status = Literal["done", "incomplete", "failed", "timed out"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one part."""

    part: Part
    status: Status
    """incomplete: it ended well, but recorded problems."""
    seconds: float
    records: Sequence[Record]

    @property
    def is_right(self) -> bool:
        """True if the part ran to its end and every check passed."""
        checks = [record.passed for record in self.records if record.kind == "check"]
        return self.status == "done" and bool(checks) and all(checks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """Settings of all parts of a run."""

    platform: Platform
    is_quick: bool
    seed: int
    attention_backend: AttentionBackend
    folder: Path
    results: Path
    environment: Mapping[str, str]
    log: Path


def run_part(part: Part, limit_s: float, orders: Orders, bounds: Bounds | None) -> Outcome:
    """Start it, wait, and kill what is left of its process group."""
    records = orders.folder / f"{part.name}.jsonl"
    folder = orders.folder / part.name
    folder.mkdir()
    given = {
        "module": part.module,
        "records": str(records),
        "attention_backend": orders.attention_backend,
        "folder": str(folder),
        "results": str(orders.results),
        "seconds": limit_s,
        "platform": orders.platform,
        "is_quick": orders.is_quick,
        "seed": orders.seed,
        "bounds": None if bounds is None else asdict(bounds),
    }
    started_s = time.monotonic()
    with orders.log.open("ab") as log:
        log.write(f"\n== {part.name}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.part", json.dumps(given)],
            cwd=ROOT,
            env=dict(orders.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:  # also when this process is interrupted
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = read_records(records)
    return Outcome(part, _status(code, found), time.monotonic() - started_s, found)


def _status(code: int | None, records: Sequence[Record]) -> Status:
    if code is None:
        return "timed out"
    if code != 0:
        return "failed"
    return "incomplete" if any(record.kind == "problem" for record in records) else "done"


def make_environment(platform: Platform, wheels: Path | None, folder: Path) -> dict[str, str]:
    """Return the variables of every part: it can import the source tree and carried packages, and uses no network."""
    paths = [ROOT, ROOT / "kernels"]
    if wheels is not None:
        paths.append(unpack(wheels, folder / "site"))
    old = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([old] if old else [])]),
        # The CPU is there as well: it computes what the GPU is compared with.
        "JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def unpack(wheels: Path, site: Path) -> Path:
    """The wheels of packages that are not installed, side by side as `pip install --target` lays them out; returns where."""
    site.mkdir(parents=True)
    for wheel in sorted(wheels.glob("*.whl")):
        if is_installed(wheel.name.partition("-")[0]):
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
