"""Host memory that jax keeps for a CPU without a copy."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

_ALIGNMENT: Final = 64
"""jax copies arrays whose address is no multiple of it."""
_HUGE_PAGE: Final = 2 << 20
_CHUNK: Final = 64 << 20
_LEAST: Final = 1 << 18
"""Bytes of the smallest array in a chunk. A chunk stays until all of its arrays are gone."""


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return new memory, not initialised, that `jax.device_put` shares with CPU devices.

    It is in huge pages if the kernel gives them on request: with 4 KiB pages a CPU that reads all weights for one token spends
    a third of the time on address translation.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return _MEMORY.take(num_bytes).view(dtype).reshape(shape)


class _ChunkedMemory:
    """Memory cut from large chunks, so that arrays smaller than a huge page share huge pages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """Return aligned bytes. Thread-safe."""
        if num_bytes < _LEAST:
            memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % _ALIGNMENT
            return memory[start : start + num_bytes]
        if num_bytes >= _CHUNK:
            return _chunk(num_bytes)[:num_bytes]
        with self._lock:
            if num_bytes > len(self._rest):
                self._rest = _chunk(_CHUNK)
            taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes + -num_bytes % _ALIGNMENT :]
        return taken


def _chunk(num_bytes: int) -> np.ndarray:
    """Return at least so many bytes from the start of a huge page on, private to this process."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        return memory[-memory.ctypes.data % _ALIGNMENT :]
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    return memory[-memory.ctypes.data % _HUGE_PAGE :]


_MEMORY: Final = _ChunkedMemory()
