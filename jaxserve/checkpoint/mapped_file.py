"""Read-only views of checkpoint files, and the form of their names and sizes in errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxserve.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Largest header of either format: the biggest real ones (262k-token vocabularies) are near 15 MB."""


def file_size(path: Path) -> int:
    """Return the size in bytes of a regular file; raise CheckpointError if it cannot be read."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: expected a file, found {'a directory' if path.is_dir() else 'nothing'}")
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def map_array(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], *, offset: int, expected_file_size: int
) -> np.ndarray:
    """Return a read-only array over a validated range of the file.

    Each call maps anew: pages are unmapped with the last view, so that reading a checkpoint tensor by tensor never
    makes the whole file resident. The size is compared again, because reading past the end of a file that shrank
    since it was opened would kill the process (SIGBUS).
    """
    found = file_size(path)
    if found != expected_file_size:
        raise CheckpointError(
            f"{path}: the file changed while it was being read: expected {expected_file_size} bytes, found {found}"
        )
    if 0 in shape:
        return np.empty(shape, dtype)
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
