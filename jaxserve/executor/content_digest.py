"""Names the content of a checkpoint, so that KV pages of two models of one shape and name are never mixed up, and no hosts with different weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from jaxserve.checkpoint.open import checkpoint_files
from jaxserve.checkpoint.peft import Adapter
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.runner.host.cores import num_cores

_NUM_WINDOWS: Final = 1024
_NUM_HOST_WINDOWS: Final = 16
_WINDOW_BYTES: Final = 256
_HEADER_BYTES: Final = 64 << 10
_MAX_THREADS: Final = 8
_CONFIG: Final = "config.json"


def content_digest(checkpoint: Checkpoint, identity: str, adapters: Sequence[Adapter] = ()) -> str:
    """Return a digest of `identity`, of samples of every file of the weights, and of all of the adapters in their order.

    The samples are the first 64 KiB of each file, 1,024 windows of 256 bytes at equal distances, and the config beside
    it: two fine-tunings of a model differ in nearly all of them. Reading everything would take longer than loading.
    """
    digest = hashlib.sha256(identity.encode())
    files = sorted({info.file for info in checkpoint.tensors.values()})
    for file in files:
        digest.update(file.name.encode())
        _add_samples(digest, file, _NUM_WINDOWS)
    for config in (folder / _CONFIG for folder in sorted({file.parent for file in files})):
        if config.is_file():
            digest.update(hashlib.sha256(config.read_bytes()).digest())
    _add_adapters(digest, adapters)
    return digest.hexdigest()


class LoadedFiles:
    """The files that weights are loaded from."""

    def __init__(self, path: Path, mmproj: Path | None = None) -> None:
        """Note the state of the files of a checkpoint (`checkpoint_files`): call this before they are opened, since they may change
        while they are read."""
        self._paths = path, mmproj
        self._stamps = self._read_stamps()
        self._hash: str | None = None

    def hash(self) -> str | None:
        """Return the `content_hash` of what was loaded, which reads it once; None if it has changed before that."""
        if self._hash is None and self.are_unchanged():
            with contextlib.suppress(CheckpointError, OSError):  # a file vanishes meanwhile, or cannot be read any more
                found = content_hash(*self._paths)
                self._hash = found if self.are_unchanged() else None
        return self._hash

    def are_unchanged(self) -> bool:
        """Return True if no file has changed since it was noted."""
        return bool(self._stamps) and self._read_stamps() == self._stamps

    def _read_stamps(self) -> list[tuple[Path, int, int, int]]:
        """Return what changes with the content of each file; nothing if one cannot be read."""
        try:
            found = [(file, file.stat()) for file in checkpoint_files(*self._paths).values()]
        except (CheckpointError, OSError):
            return []
        return [(file, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in found]


def content_hash(path: Path, mmproj: Path | None = None) -> str:
    """Return a hash of the names and of every byte of the files of a checkpoint (`checkpoint_files`). Other weights have another hash.

    Raises CheckpointError in one line.
    """
    files = checkpoint_files(path, mmproj)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(num_cores(), _MAX_THREADS), thread_name_prefix="hash") as threads:
        for name, of_file in zip(files, threads.map(_file_hash, files.values()), strict=True):
            digest.update(repr((name, of_file)).encode())
    return digest.hexdigest()


def _file_hash(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None


def weights_digest(checkpoints: Iterable[Checkpoint], adapters: Sequence[Adapter] = ()) -> str:
    """Return 16 hex digits over samples of every file of the weights, whatever its name on this host, and all of the adapters.

    The samples are the first 64 KiB of each file and 16 windows of 256 bytes: few, since a large model has hundreds of files, which
    may lie on a network. Hosts with different revisions of a model have different samples.
    """
    digest = hashlib.sha256()
    for checkpoint in checkpoints:
        for file in sorted({info.file for info in checkpoint.tensors.values()}):
            _add_samples(digest, file, _NUM_HOST_WINDOWS)
    _add_adapters(digest, adapters)
    return digest.hexdigest()[:16]


def _add_adapters(digest: hashlib._Hash, adapters: Sequence[Adapter]) -> None:
    """Add configs and tensors. An adapter's number is its position, so another order is another content."""
    for adapter in adapters:
        digest.update(json.dumps(adapter.config, sort_keys=True).encode())
        for name, tensor in sorted(adapter.file.tensors.items()):
            digest.update(repr((name, tensor.shape, tensor.dtype)).encode())
            digest.update(np.ascontiguousarray(adapter.file.read(name)).reshape(-1).view(np.uint8).data)


def _add_samples(digest: hashlib._Hash, file: Path, num_windows: int) -> None:
    size = file.stat().st_size
    digest.update(f" {size}".encode())
    with file.open("rb") as content:
        digest.update(content.read(_HEADER_BYTES))
        for window in range(num_windows):
            content.seek(size * window // num_windows)
            digest.update(content.read(_WINDOW_BYTES))
