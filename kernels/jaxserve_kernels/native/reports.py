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
_MOST_BYTES: Final = 1 << 16


def report(tokens: Int[Array, "B"], step: Int[Array, ""], is_last: Bool[Array, ""]) -> Int[Array, "B"]:
    """Return the tokens, which `Reports` of this process gets when they are known. step: number of the step in its loop."""
    about = jnp.stack([step, is_last.astype(jnp.int32)])
    same: Array = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(tokens.shape, jnp.int32))(tokens, about)
    return same


class Reports:
    """The reading end of the pipe that all loops of this process write to; a process has one.

    Loops run one after the other. `next` reads the reports of the oldest one that has not been read to its end; `end` follows
    when its results are there. A loop whose first reports are lost, with those of one that was not read to its end, or because
    the pipe was full, is not read: results have all tokens in any case.
    """

    def __init__(self) -> None:
        self._file, self._target = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)
        self._num_read = 0
        """Reports of the loop that were read; -1: none is read any more."""
        self._is_whole = False
        """True if the loop's last report was read: those that follow are of the next loop."""
        self._send_to(self._target)

    def next(self, num_rows: int, is_done: Callable[[], bool]) -> np.ndarray | None:
        """Wait for the tokens of the loop's next step, int32 [B]; None if that is its last one, or cannot be known."""
        if self._num_read < 0:
            return None
        while not self._poll.poll(_LOOK_MS):
            if is_done():
                return None
        found = np.frombuffer(os.read(self._file, 4 * (2 + num_rows)), np.int32)
        if len(found) != 2 + num_rows or found[0] != self._num_read or found[1]:
            self._is_whole = len(found) == 2 + num_rows and found[0] == self._num_read
            self._num_read = -1
            return None
        self._num_read += 1
        return found[2:]

    def end(self) -> None:
        """Forget what the loop has reported. Call it when its results are there."""
        while not self._is_whole and self._poll.poll(0):
            os.read(self._file, _MOST_BYTES)
        self._num_read, self._is_whole = 0, False

    def close(self) -> None:
        """Let later loops report nothing."""
        self._send_to(-1)
        os.close(self._target)
        os.close(self._file)

    @staticmethod
    def _send_to(file: int) -> None:
        library = register()
        assert library is not None, "loops report by the native library"
        ctypes.CDLL(str(library)).jaxserve_report_to(file)
