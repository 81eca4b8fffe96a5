"""A copy of the program in which a test adds or extends files, and the files that CONTRIBUTING names for an addition."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = (
    "jaxserve",
    "kernels",
    "docs",
    "tests",
    "benchmarks",
    "CONTRIBUTING.md",
    "README.md",
    "pyproject.toml",
    "Makefile",
)
_UNNEEDED = shutil.ignore_patterns("*.pyc.*", ".venv*", "node_modules", "*.png")
"""The first pattern is bytecode that another process writes at this moment. Finished bytecode is copied: Python compares it with
the time and size of its source, so it compiles only what an addition has changed."""


@dataclass
class Overlay:
    """The copied program, and the paths that differ from the original."""

    root: Path
    changed: set[str] = field(default_factory=set)

    @property
    def python(self) -> list[str]:
        return [sys.executable]

    @property
    def python_path(self) -> str:
        return f"{self.root}:{self.root / 'kernels'}"

    def add(self, path: str, text: str) -> None:
        """Add a new file."""
        assert not (self.root / path).exists(), f"{path} exists: an addition must not replace it"
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, "utf-8")
        self.changed.add(path)

    def insert(self, path: str, text: str, *, before: str) -> None:
        """Insert lines before the only line that contains `before`."""
        lines = (self.root / path).read_text("utf-8").splitlines(keepends=True)
        [place] = [number for number, line in enumerate(lines) if before in line]
        lines[place:place] = [text + "\n"]
        (self.root / path).unlink()  # a hard link of the original
        (self.root / path).write_text("".join(lines), "utf-8")
        self.changed.add(path)

    def run(self, *command: str, **variables: str) -> str:
        """Return the standard output of `python COMMAND` in the copy; fail with its error output."""
        environment = os.environ | {"PYTHONPATH": self.python_path, "JAX_PLATFORMS": "cpu"} | variables
        done = subprocess.run(
            [sys.executable, *command], cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def copy_program(folder: Path) -> Overlay:
    """Copy the program by hard links: milliseconds, and no bytes."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            copy = shutil.copy2 if name == "docs" else _link  # `make docs` overwrites pages in place
            shutil.copytree(ROOT / name, folder / name, copy_function=copy, ignore=_UNNEEDED)
        else:
            _link(str(ROOT / name), str(folder / name))
    return Overlay(folder)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def named_files(addition: str) -> list[str]:
    """Return the path patterns of CONTRIBUTING's row for `addition`; `NAME` stands for any name."""
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    [row] = re.findall(rf"^\| {re.escape(addition)} \|(.*)\|$", page, re.M)
    return [path.replace("NAME", "*") for path in re.findall(r"`([^`]+/[^`]*|[\w.]+\.py)`", row)]


def unnamed(overlay: Overlay, addition: str) -> set[str]:
    """Return changed paths that CONTRIBUTING does not name for `addition`."""
    patterns = named_files(addition)
    return {path for path in overlay.changed if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)}
