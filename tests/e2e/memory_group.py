"""A control group with a memory limit, as a container has one, made by a test that runs as root."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.runner.host.cgroup import ROOT, _folders
from tests.e2e.http_server import until

_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
_TAKE = """
import sys
held = b"x" * int(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
more = b"x" * int(sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group of version 1 or 2, by its folder."""

    folder: Path

    @property
    def used_bytes(self) -> int:
        """The memory that its processes take, with the page cache of their files."""
        files = (self.folder / name for name in ("memory.current", "memory.usage_in_bytes"))
        return next(int(file.read_text()) for file in files if file.exists())

    def limit(self, num_bytes: int) -> None:
        """Let the processes have so much memory, and no swap."""
        self._write("memory.memsw.limit_in_bytes", -1)  # v1: never less than that of memory, so it is raised first
        self._write("memory.max", num_bytes)
        self._write("memory.limit_in_bytes", num_bytes)
        self._write("memory.memsw.limit_in_bytes", num_bytes)
        self._write("memory.swap.max", 0)

    def inside(self, *words: str) -> list[str]:
        """Return the command that runs `words` in the group."""
        return ["sh", "-c", _ENTER, str(self.folder), *words]

    def taking(self, first: int, then: int) -> list[str]:
        """Return the command of a process that takes `first` bytes, prints a line, and takes `then` more when its input ends."""
        return self.inside(sys.executable, "-c", _TAKE, str(first), str(then))

    def _write(self, name: str, value: int) -> None:
        """Set a limit, if this version of control groups, and this kernel, have it."""
        if (self.folder / name).exists():
            (self.folder / name).write_text(str(value))


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup | None]:
    """A group below the innermost one around this process that may have one; None if none may. It is removed when its processes have ended."""
    folders = (around / name for around in reversed([*_folders(ROOT, "memory")]))
    group = next((MemoryGroup(folder) for folder in folders if _is_made(folder)), None)
    try:
        yield group
    finally:
        if group is not None:
            until(lambda: not (group.folder / "cgroup.procs").read_text(), "a process of the group did not end")
            group.folder.rmdir()


def _is_made(folder: Path) -> bool:
    """Make a group; return True if it may have a limit and processes."""
    try:
        folder.mkdir()
    except OSError:
        return False
    has_limit = any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes"))
    if (
        has_limit
        and subprocess.run(MemoryGroup(folder).inside("true"), capture_output=True, check=False).returncode == 0
    ):
        return True
    folder.rmdir()
    return False
