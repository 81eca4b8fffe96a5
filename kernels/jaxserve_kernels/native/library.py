"""Where the compiled kernels of this host are, and how JAX comes to know them."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import jax

TARGETS: Final = ("jaxserve_matmul", "jaxserve_attention", "jaxserve_matmul_int8")
"""FFI targets, which are also the library's symbols. A processor that has no instruction for one lacks it."""
SOURCES: Final = Path(__file__).parent / "csrc"
BUILT: Final = Path(__file__).parent / "_built"


def library_file() -> Path:
    """Where the library for this source, this jaxlib and this processor is, once it is built."""
    return BUILT / f"kernels-{_fingerprint()}.so"


def register() -> Path | None:
    """Load the library of this host, once per process; None when it was not built."""
    file = library_file()
    if not file.is_file():
        return None
    _register(file)
    return file


def has(target: str) -> bool:
    """Whether the library of this host was built and has this kernel; registers it."""
    file = register()
    return file is not None and target in _register(file)


@cache
def _register(file: Path) -> frozenset[str]:
    library = ctypes.CDLL(str(file))
    targets = frozenset(target for target in TARGETS if hasattr(library, target))
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
    return targets


@cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(f"{version('jaxlib')} {platform.machine()} {_processor_flags()}".encode())
    return digest.hexdigest()[:16]


def _processor_flags() -> str:
    """What the processor can execute: the library is compiled for exactly that."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return ""
