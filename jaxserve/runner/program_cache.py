"""Compiled programs on disk: a restart neither traces nor compiles.

Any problem of the cache is a warning and a compilation, never a failed start.

TRUST: a user who can write to the directory can run code in the engine (JAX unpickles what it stores), so it must belong
to this user, or to root as in a container image, and no other user may write to it. Root's group counts as root: with
`fsGroup: 0` Kubernetes makes everything on a volume writable for that group at each mount, a directory of 0700 as well.

SIZE: a new version, machine or setting means new keys, so old entries pile up. The least recently used ones are removed
when they grow past the limit; an entry's modification time is its last use. Other files are not touched.

ENTRY: a checksum over the rest, then the pickled executable with the trees of its arguments and results.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import stat
import tempfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import jax
import msgspec
from jax.experimental import serialize_executable

_LOG = logging.getLogger(__name__)
DEFAULT_DIRECTORY: Final = "~/.cache/jaxserve/programs"
DEFAULT_MAX_BYTES = 2 << 30
SUFFIX = ".program"
TUNED: Final = "autotune"
_CHECKSUM_BYTES = 4
_TRUSTED_GROUP: Final = 0


InAll = Callable[[str, Collection[str]], Collection[str]]


class ProgramCache:
    """A trusted directory of serialised executables. With `directory=None` the cache is always empty."""

    def __init__(
        self, directory: Path | None, max_bytes: int = DEFAULT_MAX_BYTES, in_all: InAll = lambda topic, names: names
    ) -> None:
        """in_all: called with a topic and the names of programs that this host has loaded; returns those that all hosts have
        loaded. The compilers of several hosts wait for each other, so hosts compile a program together or not at all.
        """
        self.directory = None if directory is None else trusted_directory(directory)
        """None if the cache is off, also because the directory cannot be used."""
        self._is_writable = self.directory is not None and os.access(self.directory, os.W_OK | os.X_OK)
        self._max_bytes = max_bytes
        self._in_all = in_all
        self._said: set[str] = set()
        """Reasons for which a program was not kept: one line for each."""
        if self.directory is not None and not self._is_writable:
            _LOG.warning("compile cache %s is read-only: what it lacks is compiled at every start", directory)

    @property
    def tuned_directory(self) -> Path | None:
        """Return the directory of the compiler's autotuner, created if it is missing; None if nothing can be kept."""
        if self.directory is None or not self._is_writable:
            return None
        directory = self.directory / TUNED
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, exist_ok=True)
            return directory
        return None

    @property
    def has_tuned(self) -> bool:
        """Return True if the autotuner has kept choices of an earlier start."""
        tuned = self.tuned_directory
        return tuned is not None and any(tuned.iterdir())

    def load(self, key: str, devices: Sequence[jax.Device]) -> jax.stages.Compiled | None:
        """Return the program stored under `key`, to run on `devices`, or None."""
        if self.directory is None:
            return None
        file = self._file(self.directory, key)
        try:
            entry = file.read_bytes()
            content = memoryview(entry)[_CHECKSUM_BYTES:]
            if zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "big") != entry[:_CHECKSUM_BYTES]:
                raise ValueError("it is damaged")  # the runtime may crash on what was changed on the disk
            payload, in_tree, out_tree = pickle.loads(content)
            compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # a foreign entry can fail anywhere in the runtime
            _LOG.warning("cached program %s cannot be used (%s): compiling it again", key, error)
            return None
        if self._is_writable:
            with contextlib.suppress(OSError):
                os.utime(file)
        return compiled

    def loaded_by_all(self, topic: str, names: Collection[str]) -> Collection[str]:
        """Return those of the programs of these names, which this host has loaded, that all hosts have loaded."""
        return self._in_all(topic, names)

    def store(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Store a program; another process sees the whole file or none."""
        if self.directory is None or not self._is_writable:
            return
        try:
            content = pickle.dumps(serialize_executable.serialize(compiled))
            checksum = zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "big")
            write_whole(self._file(self.directory, key), checksum + content)
            self._prune(self.directory)
        except Exception as error:  # a full disk, or a backend that cannot serialise
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            level = logging.DEBUG if reason in self._said else logging.WARNING
            self._said.add(reason)
            _LOG.log(
                level,
                "compile cache %s does not keep programs, so every start compiles them: %s",
                self.directory,
                reason,
            )

    def num_bytes(self, key: str) -> int | None:
        """Return the entry's size on disk; None if there is none."""
        if self.directory is None:
            return None
        try:
            return self._file(self.directory, key).stat().st_size
        except OSError:
            return None

    @staticmethod
    def _file(directory: Path, key: str) -> Path:
        return directory / f"{key}{SUFFIX}"

    def _prune(self, directory: Path) -> None:
        """Remove the least recently used entries until the rest fits; other processes may do the same meanwhile."""
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


def cache_directory(setting: str | None) -> Path | None:
    """Return the directory of `--compile-cache`; None for `off`, and if the user has no home directory."""
    if setting == "off":
        return None
    try:
        return Path(setting or DEFAULT_DIRECTORY).expanduser()
    except RuntimeError as error:
        _LOG.warning("compile cache is off: %s", error)
        return None


def trusted_directory(directory: Path) -> Path | None:
    """Return `directory`, created if it is missing (0700); None with a warning if it cannot be used."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = directory_problem(directory)
    except OSError as error:
        problem = str(error)
    if problem is not None:
        _LOG.warning("compile cache %s is off: %s", directory, problem)
        return None
    status = directory.stat()
    if status.st_uid == os.getuid() and status.st_mode & stat.S_IWGRP:
        with contextlib.suppress(OSError):  # a read-only volume
            directory.chmod(0o700)
    return directory


def directory_problem(directory: Path) -> str | None:
    """Return the reason why a directory that exists cannot be used; None if it can. Raises OSError."""
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if not os.access(directory, os.R_OK | os.X_OK):
        return "no permission to read it"
    writers = stat.S_IWOTH if status.st_gid == _TRUSTED_GROUP else stat.S_IWGRP | stat.S_IWOTH
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & writers:
        return (
            "the directory must belong to this user, or to root, and no other user may write to it (mode 0700 or 0755; "
            "on a volume of Kubernetes fsGroup: 0)"
        )
    return None


def write_whole(path: Path, content: bytes) -> None:
    """Write all of a file or nothing. A killed process leaves a file with a program's suffix, which is pruned later."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=SUFFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # who may read it is up to the directory
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


FILE_NAME: Final = "manifest.json"
FORMAT: Final = 1
_SHOWN_CHARACTERS: Final = 60
_SHOWN_WORDS: Final = 6


class ManifestEntry(msgspec.Struct, frozen=True):
    name: str
    file: str
    num_bytes: int
    compile_seconds: float | None
    """Wall clock, beside other programs; None: it was in the cache already."""


class Manifest(msgspec.Struct, frozen=True):
    """The programs of a directory that `jaxserve compile` filled, and the parts of their keys.

    Programs are found by their keys, not by the manifest: it is for people, and for reporting why a cache does not fit.
    """

    format: int
    model: str
    key_parts: dict[str, str] = msgspec.field(name="facts")
    """The parts of the programs' keys, by name."""
    settings: dict[str, str]
    """The settings that decided the rest, to repeat when serving."""
    programs: list[ManifestEntry]


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """Put the list into `directory`; returns the file. Raises OSError."""
    path = directory / FILE_NAME
    write_whole(path, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    return path


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest in `directory`; None if there is none, or one of another format or damaged."""
    try:
        manifest = msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if manifest.format == FORMAT else None


def explain_misses(directory: Path, key_parts: Mapping[str, str], num_missing: int) -> None:
    """One warning that says why `num_missing` programs were not found, if `directory` was filled on purpose."""
    manifest = read_manifest(directory)
    if manifest is None or not num_missing:
        return
    reasons = differences(manifest.key_parts, key_parts) or ["entries are missing or damaged"]
    _LOG.warning(
        "compile cache %s was filled for another setup, %d programs had to be compiled: %s",
        directory,
        num_missing,
        "; ".join(reasons),
    )


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the parts that differ between `there` and `here`, by name."""
    return [
        f"{name}: {_contrast(there.get(name, ''), here.get(name, ''))}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name, "") != here.get(name, "")
    ]


def _contrast(there: str, here: str) -> str:
    if len(there) <= _SHOWN_CHARACTERS and len(here) <= _SHOWN_CHARACTERS:
        return f"{there or 'none'} there, {here or 'none'} here"
    only_there, only_here = (_some(one, other) for one, other in ((there, here), (here, there)))
    return f"only there {only_there}, only here {only_here}"


def _some(one: str, other: str) -> str:
    """Return the first words of `one` that `other` lacks."""
    others = set(other.split())
    words = [word for word in one.split() if word not in others]
    more = f" and {len(words) - _SHOWN_WORDS} more" if len(words) > _SHOWN_WORDS else ""
    return " ".join(words[:_SHOWN_WORDS]) + more if words else "nothing"
