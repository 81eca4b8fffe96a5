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
from benchmarks.gpu.records import FINDINGS, Record, as_line, read_records, settled_names, unended_names
from jaxserve.config import AttentionBackend

ROOT = Path(__file__).parents[2]
MEMORY_SHARE = "0.92"
"""Fraction of the device's memory for JAX: its default of 0.75 is too little for the largest batches."""

MIN_RESTART_S = 10.0
"""Less is too little for another process to start and do something."""
POLL_S = 0.5
SILENT = -1
"""In place of the exit code of a process that was killed within an attempt."""

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


class PartInterruptedError(Exception):
    """Someone interrupted the run in the middle of a part."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.part.name)
        self.outcome = outcome
        """Outcome of the part as far as it went."""


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
    """Run a part to its end or its time limit.

    A process that ends within an attempt, or is silent in one for too long, loses that attempt and no other: a new
    process makes those that are left. Raises PartInterruptedError instead of KeyboardInterrupt.
    """
    records = orders.folder / f"{part.name}.jsonl"
    (orders.folder / part.name).mkdir()
    started_s = time.monotonic()
    blamed_before: set[str] = set()
    while True:
        left_s = limit_s - (time.monotonic() - started_s)
        try:
            code, reason = _run_process(part, left_s, orders, bounds, records, is_restarted=bool(blamed_before))
        except KeyboardInterrupt:
            raise PartInterruptedError(_outcome(part, None, "the run was interrupted", records, started_s)) from None
        found = read_records(records)
        unended = unended_names(found)
        lost = {record.name: record.text for record in found if record.kind == "lost"}
        # One of several may be at fault: all are made again, once.
        blamed = unended if code is None or len(unended) == 1 else [each for each in unended if each in blamed_before]
        blamed_before |= set(unended)
        with records.open("a", encoding="utf-8") as file:
            for name in blamed:
                file.write(as_line(Record("problem", name, text=lost.get(name, reason))))
        left_s = limit_s - (time.monotonic() - started_s)
        if code in (0, None) or not unended or left_s < MIN_RESTART_S:
            break
    return _outcome(part, code, reason, records, started_s)


def _outcome(part: Part, code: int | None, reason: str, records: Path, started_s: float) -> Outcome:
    """Return what the part's processes recorded; what they announced and did not reach is missing for `reason`."""
    found = read_records(records)
    expected = dict.fromkeys(record.name for record in found if record.kind == "expected")
    missing = [name for name in expected if name not in settled_names(found)]
    found += [Record("problem", name, text=f"not reached: {reason}") for name in missing]
    findings = [record for record in found if record.kind in FINDINGS]
    return Outcome(part, _status(code, findings), time.monotonic() - started_s, findings)


def _run_process(
    part: Part, limit_s: float, orders: Orders, bounds: Bounds | None, records: Path, *, is_restarted: bool
) -> tuple[int | None, str]:
    """Start a process, wait, and kill what is left of its group.

    Returns its exit code, None when the part's time was up, and the end in words.
    """
    given = {
        "module": part.module,
        "records": str(records),
        "attention_backend": orders.attention_backend,
        "folder": str(orders.folder / part.name),
        "results": str(orders.results),
        "seconds": limit_s,
        "platform": orders.platform,
        "is_quick": orders.is_quick,
        "seed": orders.seed,
        "bounds": None if bounds is None else asdict(bounds),
        "is_restarted": is_restarted,
        "settled": sorted(settled_names(read_records(records))),
    }
    with orders.log.open("ab") as log:
        log.write(f"\n== {part.name}\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.part", json.dumps(given)],
            cwd=ROOT,
            env=with_more(orders.environment, part.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return _wait(process, limit_s, part.attempt_s, records)
        finally:  # also when this process is interrupted
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(
    process: subprocess.Popen[bytes], limit_s: float, attempt_s: float | None, records: Path
) -> tuple[int | None, str]:
    """Wait until the process ends, its time is up, or an attempt takes longer than `attempt_s`; see `_run_process`."""
    end_s = time.monotonic() + limit_s
    size, changed_s = -1, time.monotonic()
    while True:
        left_s = end_s - time.monotonic()
        try:
            code = process.wait(max(0.0, min(left_s, POLL_S if attempt_s is not None else left_s)))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end_s:
                return None, "the part's time was up"
        else:
            return code, f"its process ended in it, exit code {code}" if code else "the part ended before it"
        new_size = records.stat().st_size if records.is_file() else 0
        if new_size != size:
            size, changed_s = new_size, time.monotonic()
        elif (
            attempt_s is not None and time.monotonic() - changed_s > attempt_s and unended_names(read_records(records))
        ):
            return SILENT, f"killed: it took more than {attempt_s:.0f} s"


def _status(code: int | None, records: Sequence[Record]) -> Status:
    if code is None:
        return "timed out"
    if code != 0:
        return "failed"
    return "incomplete" if any(record.kind == "problem" for record in records) else "done"


def make_environment(platform: Platform, wheels: Path | None, folder: Path) -> dict[str, str]:
    """Return the variables of every part.

    A part can import the source tree and carried packages, uses no network, and takes the matmuls and fusions that an
    earlier part has tuned.
    """
    paths = [ROOT, ROOT / "kernels"]
    if wheels is not None:
        paths.append(unpack(wheels, folder / "site"))
    old = os.environ.get("PYTHONPATH")
    tuned = folder / "autotune"
    tuned.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([old] if old else [])]),
        # The CPU is there as well: it computes what the GPU is compared with.
        "JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_per_fusion_autotune_cache_dir={tuned}".strip(),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_SHARE,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def with_more(environment: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return both; XLA_FLAGS are joined."""
    flags = " ".join(each["XLA_FLAGS"] for each in (environment, more) if each.get("XLA_FLAGS"))
    return {**environment, **more, **({"XLA_FLAGS": flags} if flags else {})}


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
