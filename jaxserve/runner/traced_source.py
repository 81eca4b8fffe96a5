"""Hashes the source that decides what a program computes, so that an edit of it invalidates cached programs.

That source is every module that the step functions import, directly or not, and the whole kernel package. Modules that
are found by scanning a folder count as imported by the module that scans. Comments, docstrings and blank lines do not
count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import jaxserve_kernels

import jaxserve

STEPS: Final = ("runner/steps.py", "runner/embedding.py")
"""The step functions. They may reach no traced code but by their imports."""
_SUFFIXES: Final = (".py", ".cc", ".h", ".json")
_IMPORT: Final = re.compile(
    rb"^[ \t]*(?:from jaxserve(?:\.([\w.]+))? import (\([^)]*\)|.*)|import jaxserve\.([\w.]+))", re.M
)
_SCANNER: Final = re.compile(rb"^(?:from|import) pkgutil", re.M)
_DOCSTRING: Final = re.compile(rb'^([ \t]*)"""(?s:.*?)"""$', re.M)


@cache
def source_hash() -> str:
    """Return 16 hex digits over the source of everything that can change what a program computes."""
    digest = hashlib.sha256()
    root, kernels = Path(jaxserve.__file__).parent, Path(jaxserve_kernels.__file__).parent
    for base, files in ((root, traced_files(root)), (kernels, kernels.rglob("*"))):
        for name, file in sorted((str(file), file) for file in files if file.suffix in _SUFFIXES):
            digest.update(name.removeprefix(str(base)).encode() + b"\0")
            digest.update(without_comments(file.read_bytes()) if file.suffix == ".py" else file.read_bytes())
    return digest.hexdigest()[:16]


def traced_files(root: Path) -> set[Path]:
    """Return the files below `root`, the folder of jaxserve, that the step functions import, directly or not."""
    found = {root / "__init__.py"}  # it imports the public names of upper packages when they are asked for
    waiting = [root / name for name in STEPS]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        source = file.read_bytes()
        waiting += _imported(root, source)
        waiting.append(file.parent / "__init__.py")
        if _SCANNER.search(source):
            waiting += file.parent.rglob("*.py")
    return found - {root / "__init__.py"}


def _imported(root: Path, source: bytes) -> Iterator[Path]:
    for base, names, whole in _IMPORT.findall(source):
        path = root.joinpath(*(base or whole).decode().split("."))
        module = path.with_suffix(".py") if path != root else path
        if module.is_file():
            yield module
            continue
        yield path / "__init__.py"
        for name in re.findall(r"\w+", names.decode()):
            yield path / f"{name}.py"
            yield path / name / "__init__.py"


def without_comments(source: bytes) -> bytes:
    """Return Python source with `...` for docstrings, and without comments and blank lines.

    Expects source as ruff formats it. `tests/unit/runner/test_traced_source.py` checks it on all of ours.
    """
    lines = _DOCSTRING.sub(rb"\1...", source).split(b"\n")
    return b"\n".join(line.partition(b"  # ")[0] for line in lines if line and not line.lstrip().startswith(b"#"))
