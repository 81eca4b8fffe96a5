"""Large zeroed arrays on CPUs that take no time to make: their memory comes later."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import jax

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: provide the pages as writing to them would, but leave what is in them."""
PIECE_BYTES: Final = 2 << 20
"""A page of the large kind. Other threads that map memory wait for no more than that."""
_PROCESSORS_PER_THREAD: Final = 20
"""The thread takes a twentieth of all processors: a tenth of one of two, half of one of ten."""
_MOST_PAUSES: Final = 9.0
_LEAST_PAUSES: Final = 1.0
_LOOK_S: Final = 0.1
"""Between two looks at whether others still need the processors."""


def untouched_zeros(*arrays: jax.ShapeDtypeStruct) -> Sequence[jax.Array]:
    """Zeros of these shapes and types, whose pages the system provides when they are touched. Needs the native library."""
    made: Sequence[jax.Array] = jax.ffi.ffi_call("jaxserve_zeros", arrays)()
    return made


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise: Callable[[int, int, int], int] = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)  # type: ignore[attr-defined]
    return madvise


def _populate(address: int, size: int) -> bool:
    """Provide the pages of this memory; return False if the kernel is older than 5.14 or the memory is gone."""
    return _madvise()(address, size, _MADV_POPULATE_WRITE) == 0


def pauses_per_piece(num_processors: int) -> float:
    """Return how many times as long as it worked on a piece the thread pauses after it, beside so many processors."""
    return min(_MOST_PAUSES, max(_LEAST_PAUSES, _PROCESSORS_PER_THREAD / num_processors - 1))


def provide_pieces(
    spans: Sequence[tuple[int, int]],
    populate: Callable[[int, int], bool],
    pause: Callable[[float], bool],
    num_pauses: float = _MOST_PAUSES,
    clock: Callable[[], float] = time.thread_time,
) -> None:
    """Provide memory piece by piece, and pause after each for `num_pauses` times as long as it took.

    Only the thread's own processor time counts: in a busy process it waits much longer for the interpreter's lock than it works, and
    pauses in proportion to that would make minutes of seconds.

    spans: address and size in bytes of each array; what is no whole piece at its ends is left out.
    populate: provides the pages of (address, size); returns False if it cannot, which ends a span.
    pause: waits for so many seconds; returns True to end everything.
    """
    for address, size in spans:
        first, end = -(-address // PIECE_BYTES) * PIECE_BYTES, address + size
        for start in range(first, end - PIECE_BYTES + 1, PIECE_BYTES):
            started_s = clock()
            if not populate(start, PIECE_BYTES):
                break
            if pause(num_pauses * (clock() - started_s)):
                return


class MemoryProvider:
    """A thread that touches the memory of arrays while nothing else is computed, so that later steps need not wait for it.

    A decode step waits for the slowest of its threads, and a piece takes a processor from one of them: memory that a request
    touches first costs it less.

    The thread has the same priority as the others. It holds the lock of the process's memory map during a piece and the
    interpreter's lock between two: a thread of low priority would be interrupted while it holds one of them, and all others would
    wait for seconds until it runs again. Short pieces with pauses keep its share of a processor small instead.
    """

    def __init__(
        self,
        arrays: Sequence[jax.Array],
        num_processors: int = 1,
        populate: Callable[[int, int], bool] = _populate,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the thread. It reads and changes nothing: arrays may be written or donated meanwhile.

        num_processors: those of the process, of which the thread takes its share. populate: as in `provide_pieces`.
        is_busy: returns True while the thread is to wait.
        """
        self._is_stopped = threading.Event()
        self._is_busy = is_busy
        spans = [(array.unsafe_buffer_pointer(), array.nbytes) for array in arrays]
        arguments = (spans, populate, self._pause, pauses_per_piece(num_processors))
        self._thread = threading.Thread(target=provide_pieces, args=arguments, name="provide memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it: afterwards it touches no memory, and the arrays may be deleted."""
        self._is_stopped.set()
        self._thread.join()

    def join(self) -> None:
        """Wait until all memory is provided."""
        self._thread.join()

    def _pause(self, seconds: float) -> bool:
        """Wait for so long, and on while others need the processors; return True if the thread is to end."""
        while not self._is_stopped.wait(seconds):
            if not self._is_busy():
                return False
            seconds = _LOOK_S
        return True
