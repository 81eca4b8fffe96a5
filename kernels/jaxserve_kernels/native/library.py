"""Where compiled kernels are, which of them this host can run, and how JAX comes to know them.

A library says in its name whom it is for, so one that this processor cannot run is never loaded.
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
    """Where the library for this source, this jaxlib and these processors is, once it is built; None: this very one."""
    if generation is None:
        return BUILT / f"kernels-{_fingerprint(processor_flags())}.so"
    return BUILT / f"kernels-{generation.name}-{_fingerprint(' '.join(generation.compiler_flags))}.so"


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
    """Whether there is a library for this host that has this kernel; registers it."""
    file = register()
    return file is not None and target in _register(file)


def has_amx() -> bool:
    """Whether products of floats can be had on a matrix unit: it is here, known to the library, and allowed to us."""
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
def _fingerprint(processors: str) -> str:
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    digest.update(f"{version('jaxlib')} {platform.machine()} {processors}".encode())
    return digest.hexdigest()[:16]
