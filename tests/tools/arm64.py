"""Runs tests as an ARM64 processor does: `python -m tests.tools.arm64 FOLDER TEST ...`, or `make arm64-check`.

Takes Debian with g++-aarch64-linux-gnu, qemu-user and `dpkg --add-architecture arm64`. FOLDER gets an ARM64 Python of
Debian's packages and the pinned wheels for ARM64; nothing is installed into the system. Times of an emulator say nothing
about a processor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jaxserve_kernels.native.build import build
from jaxserve_kernels.native.processors import GENERATIONS

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = "3.11"
PACKAGES: Final = (
    *(f"python{PYTHON}", f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5"),
    *("libsqlite3-0", "libuuid1", "libcrypt1", "libncursesw6", "libtinfo6", "libreadline8", "libdb5.3", "libgomp1"),
)
PLATFORMS: Final = tuple(f"manylinux{glibc}_aarch64" for glibc in ("2014", "_2_17", "_2_27", "_2_28", "_2_31", "_2_34"))
NEON: Final = next(generation for generation in GENERATIONS if generation.machine == "aarch64")
WANTED: Final = "from jaxserve_kernels.native.library import library_file; print(library_file())"


def main(folder: Path, tests: Sequence[str]) -> int:
    """Return pytest's exit code. Raises subprocess.CalledProcessError and BuildError."""
    root, wheels = folder / "root", folder / "site"
    if not root.exists():
        print("== an ARM64 Python", flush=True)
        install_python(folder / "packages", root)
    if not wheels.exists():
        print("== wheels for ARM64", flush=True)
        install_wheels(wheels)
    print("== native kernels for ARM64", flush=True)
    library = build(NEON)
    python = ["qemu-aarch64", "-L", str(root), str(root / f"usr/bin/python{PYTHON}")]
    environment = os.environ | {
        "PYTHONHOME": str(root / "usr"),
        "PYTHONPATH": f"{wheels}:{ROOT}:{ROOT / 'kernels'}",
        "JAX_PLATFORMS": "cpu",
    }
    # The emulator shows the features of the processor that runs it, so the library is taken as one that was built there.
    done = subprocess.run([*python, "-c", WANTED], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    shutil.copy(library, done.stdout.strip())
    return subprocess.run([*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], env=environment).returncode


def install_python(packages: Path, root: Path) -> None:
    """Unpack Debian's packages into `root`."""
    packages.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-q", *(f"{name}:arm64" for name in PACKAGES)], cwd=packages, check=True)
    unfinished = root.with_suffix(".part")
    for file in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "-x", file, unfinished], check=True)
    unfinished.rename(root)


def install_wheels(target: Path) -> None:
    """Unpack the wheels of the servers and of the tests."""
    unfinished = target.with_suffix(".part")
    words = [word for platform in PLATFORMS for word in ("--platform", platform)]
    words += [word for name in ("cpu", "dev") for word in ("-r", str(ROOT / f"requirements/{name}.lock"))]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
    ]
    subprocess.run([*command, "--python-version", PYTHON, "--target", str(unfinished), *words], check=True)
    unfinished.rename(target)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2:]))
