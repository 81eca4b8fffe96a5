"""Compiled programs on disk: a restart neither traces nor compiles.

TRUST: whoever can write the directory can run code in the engine (JAX unpickles what it stores), so a
directory that is not ours alone is refused. The key covers all that a program depends on, our own
source included. Any fault of the cache is a warning and a compilation, never a failed start.

SIZE: a new version, machine or setting means new keys, so old entries pile up. Those used longest ago go
when they grow past the limit; an entry's modification time is its last use. Other files are not touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jaxserve_kernels
from jax.experimental import serialize_executable

import jaxserve

_LOG = logging.getLogger(__name__)
DEFAULT_DIRECTORY = "~/.cache/jaxserve/programs"
DEFAULT_MAX_BYTES = 2 << 30
SUFFIX = ".program"
_TRACED_ROOMS = ("layers", "models", "runner", "sampling", "sharding", "scheduler", "types.py")
"""Rooms whose source decides what a program computes."""


def cache_directory(setting: str | None) -> Path | None:
    """The directory that `--compile-cache` means; None for `off`, and where there is no home to put it in."""
    if setting == "off":
        return None
    try:
        return Path(setting or DEFAULT_DIRECTORY).expanduser()
    except RuntimeError as error:
        _LOG.warning("compile cache is off: %s", error)
        return None


class ProgramCache:
    """A private directory of serialised executables. `directory=None` is a cache that is always empty."""

    def __init__(self, directory: Path | None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._directory = None if directory is None else _private(directory)
        self._max_bytes = max_bytes

    def load(self, key: str, in_tree: Any, out_tree: Any, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """The program stored under `key`, to run on `devices`, or None."""
        if self._directory is None:
            return None
        file = self._directory / f"{key}{SUFFIX}"
        try:
            compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                file.read_bytes(), in_tree, out_tree, execution_devices=devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged or foreign entry can fail anywhere in the runtime
            _LOG.warning("cached program %s cannot be used (%s): compiling it again", key, error)
            return None
        with contextlib.suppress(OSError):  # a directory that is shared read-only
            os.utime(file)
        return compiled

    def store(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Keep a program; another process sees the whole file or none."""
        if self._directory is None:
            return
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            _write(self._directory / f"{key}{SUFFIX}", payload)
            self._prune(self._directory)
        except Exception as error:  # a full disk, or a backend that cannot serialise
            _LOG.warning("program not kept in the compile cache: %s", error)

    def _prune(self, directory: Path) -> None:
        """Remove what was used longest ago until the rest fits; other processes may do the same meanwhile."""
        entries = []
        for file in directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                entries.append((status.st_mtime_ns, status.st_size, file))
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        for _, size, file in sorted(entries):
            if excess <= 0:
                break
            file.unlink(missing_ok=True)
            excess -= size


def _write(path: Path, payload: bytes) -> None:
    """All of it or nothing. What a killed process leaves has the suffix too, and goes in its time."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=SUFFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(payload)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _private(directory: Path) -> Path | None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        _LOG.warning("compile cache %s is off: %s", directory, error)
        return None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _LOG.warning("compile cache %s is off: the directory must belong to this user alone (mode 0700)", directory)
        return None
    return directory


def program_key(*parts: object) -> str:
    """The file name for a program that depends on `parts` besides versions, machine, flags and our source."""
    digest = hashlib.sha256()
    device = jax.devices()[0]
    machine = (
        jax.__version__,
        version("jaxlib"),
        device.platform,
        device.device_kind,
        _host_features(),
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        _source_hash(),
    )
    for part in (*machine, *parts):
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    root = Path(jaxserve.__file__).parent
    places = [root / room for room in _TRACED_ROOMS] + [Path(jaxserve_kernels.__file__).parent]
    for place in places:
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def _host_features() -> str:
    """What the host's processor can execute: XLA compiles host code for exactly that."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            lines = {line for line in file if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        return platform.processor()
    return "".join(sorted(lines))
