"""Compiles the kernels for this host: `python -m jaxserve_kernels.native.build`.

Takes a C++17 compiler (g++ or clang++) and about ten seconds. The library goes into this package, so it is
trusted exactly as far as the package is.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import jax

from jaxserve_kernels.native.library import SOURCES, library_file

COMPILERS: Final = ("c++", "g++", "clang++")
FLAGS: Final = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=fast", "-w")
TIMEOUT_S: Final = 600


class BuildError(Exception):
    """Why there is no library, in one line."""


def build() -> Path:
    """The library of this host; compiled unless it is there. Raises BuildError."""
    file = library_file()
    if file.is_file():
        return file
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"there are no native kernels for {platform.machine()}")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    try:
        file.parent.mkdir(exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=file.parent, suffix=".part")
    except OSError as error:
        raise BuildError(f"{file.parent} cannot be written: {error.strerror}") from error
    os.close(descriptor)
    try:
        _compile(compiler, Path(unfinished))
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, file)
    except BaseException:
        os.unlink(unfinished)
        raise
    return file


def _compile(compiler: str, target: Path) -> None:
    units = sorted(map(str, SOURCES.glob("*.cc")))
    command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", *units, "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler}: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise BuildError(f"{compiler} failed: {first}")


def main() -> int:
    """Exit code 0 when the library is there."""
    try:
        print(f"native CPU kernels: {build().name}")
    except BuildError as error:
        print(f"native CPU kernels not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
