"""Finds the compiled kernels that this host can run, and registers them with JAX.

A library's name contains its processors, so one that this processor cannot run is never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import jax

from jaxserve_kernels.native.processors import GENERATIONS, Generation, processor_flags

_TARGET: Final = re.compile(r"^\w+\((jaxserve_\w+),", re.M)
"""The definition of an FFI handler, by a macro whose first argument is its name."""
BUILT: Final = Path(__file__).parent / "_built"


def library_file(generation: Generation | None = None) -> Path:
    """Return the library's path for this source and these processors; None: for this very processor and jaxlib.

    A generation's library serves newer versions of jaxlib, too: XLA runs handlers of older versions of its FFI for at
    least a year.
    """
    if generation is None:
        return BUILT / f"kernels-{_fingerprint(platform.machine(), version('jaxlib') + processor_flags())}.so"
    fingerprint = _fingerprint(generation.machine, " ".join(generation.compiler_flags))
    return BUILT / f"kernels-{generation.name}-{fingerprint}.so"


def built_library() -> Path | None:
    """The best library that was built and that this processor can run."""
    fitting = (generation for generation in GENERATIONS if generation.is_here)
    return next((file for file in map(library_file, (None, *fitting)) if file.is_file()), None)


def register() -> Path | None:
    """Load the library of this host, once per process; None when there is none."""
    file = built_library()
    if file is not None:
        _register(file)
    return file


def has(target: str) -> bool:
    """Return True if a library for this host has this kernel; registers it."""
    file = register()
    return file is not None and target in _register(file)


def has_amx() -> bool:
    """Return True if this processor has AMX, the library uses it, and the system allows it."""
    file = register()
    return file is not None and bool(ctypes.CDLL(str(file)).jaxserve_has_matrix_unit())


def sources() -> list[Path]:
    """Return the C++ files of all ops: `<op>/csrc/*`. Headers of `native/csrc` are on their include path."""
    return sorted(Path(__file__).parents[1].glob("*/csrc/*"))


@cache
def _register(file: Path) -> frozenset[str]:
    """Register the FFI targets that the sources define and the library has: some need instructions of newer processors."""
    library = ctypes.CDLL(str(file))
    defined = (target for source in sources() for target in _TARGET.findall(source.read_text("utf-8")))
    targets = frozenset(target for target in defined if hasattr(library, target))
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return targets


@cache
def _fingerprint(machine: str, target: str) -> str:
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    digest.update(f"{machine} {target}".encode())
    return digest.hexdigest()[:16]
