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

TARGETS: Final = ("jaxserve_matmul", "jaxserve_attention")
"""FFI targets, which are also the library's symbols."""
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


@cache
def _register(file: Path) -> None:
    library = ctypes.CDLL(str(file))
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")


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
