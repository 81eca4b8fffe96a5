"""Reads process trees, CPU time and memory from the kernel."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of `/proc/PID/stat`, as far as it is wanted."""

    pid: int
    parent: int
    session: int
    cpu_s: float
    """Its own, and that of children it has waited for."""
    is_zombie: bool = False


def parse_stat(text: str) -> Stat:
    """The program's name, which may hold anything, is the part in parentheses."""
    pid = int(text.partition(" ")[0])
    fields = text.rpartition(")")[2].split()
    cpu_s = sum(map(int, fields[11:15])) / TICKS_PER_S
    return Stat(pid, int(fields[1]), int(fields[3]), cpu_s, is_zombie=fields[0] == "Z")


def all_processes() -> list[Stat]:
    """Return the running processes: zombies hold neither memory nor ports."""
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                found.append(parse_stat((folder / "stat").read_text(encoding="utf-8", errors="replace")))
    return [each for each in found if not each.is_zombie]


def tree_of(root: int, processes: Iterable[Stat]) -> list[Stat]:
    """`root`, its descendants, and all processes that share a session with one of them: an orphan still counts."""
    members: dict[int, Stat] = {}
    sessions = {root}
    waiting = list(processes)
    while True:
        added = [each for each in waiting if each.pid == root or each.parent in members or each.session in sessions]
        if not added:
            return list(members.values())
        members |= {each.pid: each for each in added}
        sessions |= {each.session for each in added if each.session == each.pid}
        waiting = [each for each in waiting if each.pid not in members]


def children_of(pid: int, module: str) -> list[int]:
    """Return the children of a process that run this Python module, in the order in which they were started."""
    found = []
    with suppress(FileNotFoundError):  # it has ended
        for child in (PROC / f"{pid}/task/{pid}/children").read_text().split():
            with suppress(FileNotFoundError):
                if module.encode() in (PROC / child / "cmdline").read_bytes():
                    found.append(int(child))
    return found


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process tree."""

    pss_mib: float
    """Shared pages are divided among those who share them."""
    peak_rss_mib: float
    """Sum of what each process held at most; shared pages count for each, so it is an upper bound."""


def memory_of(tree: Iterable[Stat]) -> Memory:
    pss, peak = 0, 0
    for each in tree:
        with suppress(OSError):
            pss += _kib(PROC / str(each.pid) / "smaps_rollup", "Pss")
            peak += _kib(PROC / str(each.pid) / "status", "VmHWM")
    return Memory(pss * 1024 / MIB, peak * 1024 / MIB)


def _kib(path: Path, name: str) -> int:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    return 0


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds used up to one moment."""

    wall_s: float
    machine_s: float
    """By everyone, on all cores."""
    children_s: float
    """By programs that this process ran and waited for: the load generator."""


def read_cpu_clock() -> CpuClock:
    with (PROC / "stat").open(encoding="utf-8") as file:
        machine_s = parse_busy_s(file.readline())
    times = os.times()
    return CpuClock(time.perf_counter(), machine_s, times.children_user + times.children_system)


def parse_busy_s(line: str) -> float:
    """CPU seconds that were neither idle nor waiting for a disk, from the first line of `/proc/stat`."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, line.split()[1:])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def describe_machine() -> dict[str, str | int | float]:
    """Return the properties of the machine that affect numbers."""
    models = [
        line.partition(":")[2].strip()
        for line in (PROC / "cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    total_kib = _kib(PROC / "meminfo", "MemTotal")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total_kib / MIB, 1),
        "kernel": platform.release(),
    }
