"""Compiles the kernels for this host: `python -m jaxserve_kernels.native.build`.

Takes a C++17 compiler (g++ or clang++) and about 90 seconds of a processor. The library goes into this package, so it is
trusted exactly as far as the package is. With `--portable` there is one for each generation of processors of a machine
instead, for an image that is built here and runs elsewhere; the host that runs it takes the best that it can. For
another machine than this one (`--machine aarch64`) it takes a cross compiler (`aarch64-linux-gnu-g++`).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import jax

from jaxserve_kernels.native.library import library_file, sources
from jaxserve_kernels.native.processors import GENERATIONS, Generation

COMPILERS: Final = ("c++", "g++", "clang++")
FLAGS: Final = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=fast", "-w")
HERE: Final = ("-march=native",)
ELSEWHERE: Final = (
    "-static-libstdc++",
    "-ffunction-sections",
    "-fdata-sections",
    "-Wl,--exclude-libs,ALL,--gc-sections,--strip-all",
)
"""The host that runs the library may have an older C++ library, or none: it comes along, without the parts that nothing uses."""
TIMEOUT_S: Final = 600
MACHINES: Final = tuple(dict.fromkeys(generation.machine for generation in GENERATIONS))


class BuildError(Exception):
    """The reason why there is no library, in one line."""


def build(generation: Generation | None = None) -> Path:
    """The library of this host, or of a generation; compiled unless it is there. Raises BuildError."""
    file = library_file(generation)
    if file.is_file():
        return file
    machine = platform.machine() if generation is None else generation.machine
    if machine not in MACHINES:
        raise BuildError(f"there are no native kernels for {machine}")
    names = COMPILERS if machine == platform.machine() else (f"{machine}-linux-gnu-g++",)
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(names)})")
    try:
        file.parent.mkdir(exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=file.parent, suffix=".part")
    except OSError as error:
        raise BuildError(f"{file.parent} cannot be written: {error.strerror}") from error
    os.close(descriptor)
    try:
        _compile(compiler, HERE if generation is None else generation.compiler_flags + ELSEWHERE, Path(unfinished))
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, file)
    except BaseException:
        os.unlink(unfinished)
        raise
    return file


def _compile(compiler: str, flags: Sequence[str], target: Path) -> None:
    """Compile the sources side by side, largest first, and link them."""
    headers = (f"-I{jax.ffi.include_dir()}", f"-I{Path(__file__).parent / 'csrc'}")
    units = sorted((each for each in sources() if each.suffix == ".cc"), key=lambda each: -each.stat().st_size)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = [Path(folder) / f"{unit.stem}.o" for unit in units]
        made = [
            threads.submit(_run, [compiler, *FLAGS, *flags, *headers, "-c", str(unit), "-o", str(file)])
            for unit, file in zip(units, objects, strict=True)
        ]
        for each in made:
            each.result()
        _run([compiler, *FLAGS, "-shared", *flags, *map(str, objects), "-o", str(target)])


def _run(command: Sequence[str]) -> None:
    """Run the compiler. Raises BuildError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise BuildError(f"{command[0]} failed: {first}")


def main() -> int:
    """Exit code 0 when every library that was asked for is there."""
    parser = argparse.ArgumentParser(description="Compile the native CPU kernels into this package.")
    parser.add_argument(
        "--portable",
        action="store_true",
        help="for all x86-64 processors with AVX2, or ARM64 processors with dot products, not for this host",
    )
    parser.add_argument("--machine", choices=MACHINES, default=platform.machine(), help="of --portable; this one's")
    arguments = parser.parse_args()
    portable = [generation for generation in GENERATIONS if generation.machine == arguments.machine]
    try:
        for generation in portable if arguments.portable else (None,):
            print(f"native CPU kernels: {build(generation).name}")
    except BuildError as error:
        print(f"native CPU kernels not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
