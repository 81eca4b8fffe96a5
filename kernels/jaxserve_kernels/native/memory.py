"""Large zeroed arrays on CPUs that take no time to make: their memory comes later."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Final

import jax

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: provide the pages as writing to them would, but leave what is in them."""
_PIECE_BYTES: Final = 2 << 20
"""A page of the large kind. Others who map memory wait for no more than that."""
_LAST_PRIORITY: Final = 19


def untouched_zeros(*arrays: jax.ShapeDtypeStruct) -> Sequence[jax.Array]:
    """Zeros of these shapes and types, whose pages the system provides when they are touched. Needs the native library."""
    made: Sequence[jax.Array] = jax.ffi.ffi_call("jaxserve_zeros", arrays)()
    return made


def provide(array: jax.Array) -> threading.Thread:
    """Touch the memory of `array` in a thread of the lowest priority, so that later steps need not wait for it.

    The array may be written or donated meanwhile, or deleted: the thread reads and changes nothing.
    """
    address, size = array.unsafe_buffer_pointer(), array.nbytes
    thread = threading.Thread(target=_populate, args=(address, size), name="provide memory", daemon=True)
    thread.start()
    return thread


def _populate(address: int, size: int) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST_PRIORITY)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first, end = -(-address // _PIECE_BYTES) * _PIECE_BYTES, address + size
    for start in range(first, end - _PIECE_BYTES + 1, _PIECE_BYTES):
        if madvise(start, _PIECE_BYTES, _MADV_POPULATE_WRITE) != 0:
            return  # an older kernel, or the memory is gone
