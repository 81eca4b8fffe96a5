"""The processes of a server, as the kernel counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from benchmarks.processes import children_of

Role = Literal["supervisor", "api", "engine"]
MODULES: Final[dict[Role, str]] = {"api": "jaxserve.runtime.api_workers", "engine": "jaxserve.engine.process"}
"""Modules that child processes of a server run."""
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process."""

    pid: int
    role: Role
    resident_bytes: int
    num_descriptors: int
    num_threads: int


def usages(server_pid: int) -> list[Usage]:
    """Return the usage of every process of a server that is alive."""
    return list(_found(server_pid))


def pids_of(server_pid: int, role: Role) -> list[int]:
    """Return the processes of a role, in the order in which they were started."""
    return children_of(server_pid, MODULES[role])


def _found(server_pid: int) -> Iterator[Usage]:
    roles: list[tuple[int, Role]] = [(server_pid, "supervisor")]
    roles += [(pid, role) for role in MODULES for pid in pids_of(server_pid, role)]
    for pid, role in roles:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            process = Path(f"/proc/{pid}")
            resident = int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
            # The name in parentheses may hold spaces; the fields after it are numbers. See proc_pid_stat(5).
            threads = int((process / "stat").read_text().rpartition(")")[2].split()[17])
            yield Usage(pid, role, resident, len(list((process / "fd").iterdir())), threads)
