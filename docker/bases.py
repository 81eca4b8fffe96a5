"""Makes base images for `container-check` of Debian's packages, for machines that reach no registry of images."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from buildah import inside, report, run

SUITE: Final = "bookworm"
"""The release of Debian that the pinned images have."""
LIBRARIES: Final = "libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1,zlib1g"
"""Debian's packages with the libraries that Python's own extension modules load."""
LEFT_OUT: Final = ("__pycache__", "test", "tests", "idlelib", "turtledemo", "config-3*", "*.a", "site-packages")
"""Parts of a Python that the slim image of Docker's library leaves out as well; pip comes from ensurepip."""


def build_bases(base: str, compiler: str, python: Path | None) -> None:
    """Make two base images: one with a Python, and one with a C++ compiler as well.

    `python` is the prefix of a Python that is built with a shared library or none for this processor's Debian; it goes to
    /usr/local. Without it the images have Debian's Python.
    """
    report(f"making base images of Debian {SUITE} with {python or 'its Python'}")
    packages = LIBRARIES if python else "python3,python3-venv"
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "root.tar"
        run("mmdebstrap", "--variant=minbase", f"--include={packages},ca-certificates", SUITE, str(archive))
        container = run("buildah", "from", "scratch")
        run("buildah", "add", "--quiet", container, str(archive), "/")
        if python:
            copy_python(python, Path(folder) / "python")
            run("buildah", "add", "--quiet", container, str(Path(folder) / "python"), "/usr/local")
    # What Debian's slim images leave out.
    extras = "/usr/share/doc /usr/share/man /usr/share/locale /usr/share/info /var/lib/apt/lists/* /var/cache/apt/*"
    link = "/usr/local/bin/python" if python else "/usr/bin/python"
    inside(container, f"ldconfig; ln -sf python3 {link}; rm -rf {extras}; python --version")
    run("buildah", "commit", "--quiet", container, base)
    inside(container, "apt-get update -qq && apt-get install -y -qq --no-install-recommends g++", network=True)
    run("buildah", "commit", "--quiet", container, compiler)
    run("buildah", "rm", container)


def copy_python(prefix: Path, target: Path) -> None:
    """Copy a Python without its tests, static libraries and installed packages."""
    (library,) = prefix.glob("lib/python3.*/")
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(library, target / "lib" / library.name, symlinks=True, ignore=ignored)
    (target / "lib" / library.name / "site-packages").mkdir()
    for shared in prefix.glob("lib/libpython*.so*"):
        shutil.copy2(shared, target / "lib" / shared.name, follow_symlinks=False)
    (target / "bin").mkdir()
    for name in ("python3", library.name):
        shutil.copy2(prefix / "bin" / name, target / "bin" / name, follow_symlinks=False)
