"""Tokens of a loop on the device, read by the host while the loop goes on."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxserve_kernels.native.library import register

_TARGET: Final = "jaxserve_report"
_LOOK_MS: Final = 20
"""Time between two looks at whether a loop has ended without a last report, which is so after an error."""


def report(tokens: Int[Array, "B"], step: Int[Array, ""], is_last: Bool[Array, ""]) -> Int[Array, "B"]:
    """Return the tokens, which `Reports` of this process gets when they are known. step: number of the step in its loop."""
    about = jnp.stack([step, is_last.astype(jnp.int32)])
    same: Array = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(tokens.shape, jnp.int32))(tokens, about)
    return same


class Reports:
    """The reading end of the pipe that all loops of this process write to; a process has one.

    Loops run one after the other, and each is ended by `end` when its results are there. `next` reads the reports of a loop
    after which none has begun. If anything else is read than the next report, nothing is read any more: results have all
    tokens in any case.
    """

    def __init__(self) -> None:
        self._file, self._target = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        self._num_read = 0
        """Reports of the oldest loop that were read."""
        self._is_whole = False
        """True if the last of them was."""
        self._is_broken = False
        self._send_to(self._target)

    def next(self, num_rows: int, is_done: Callable[[], bool]) -> np.ndarray | None:
        """Wait for the tokens of the loop's next step, int32 [B]; None if that is its last one, or cannot be known."""
        if self._is_whole or self._is_broken:
            return None
        while not self._poll.poll(_LOOK_MS):
            if is_done():
                return None
        tokens = self._read(num_rows)
        return None if self._is_whole else tokens

    def end(self, num_rows: int) -> None:
        """Forget what is left of the oldest loop's reports. Call it when its results are there."""
        while not self._is_whole and not self._is_broken and self._poll.poll(0):
            self._read(num_rows)
        self._num_read, self._is_whole = 0, False

    def _read(self, num_rows: int) -> np.ndarray | None:
        found = np.frombuffer(os.read(self._file, 4 * (2 + num_rows)), np.int32)
        if len(found) != 2 + num_rows or found[0] != self._num_read:
            self._is_broken = True
            self._send_to(-1)
            return None
        self._num_read += 1
        self._is_whole = bool(found[1])
        return found[2:]

    def close(self) -> None:
        """Let later loops report nothing. The pipe stays open: a loop may be writing to it, and its number must name nothing else."""
        self._send_to(-1)

    @staticmethod
    def _send_to(file: int) -> None:
        library = register()
        assert library is not None, "loops report by the native library"
        ctypes.CDLL(str(library)).jaxserve_report_to(file)
