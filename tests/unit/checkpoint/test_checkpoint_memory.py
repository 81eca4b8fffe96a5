"""Memory that jax shares with CPU devices."""

from __future__ import annotations

import gc
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.memory import aligned_empty

MIB = 1 << 20
FLOAT = np.dtype(np.float32)


def mapping_of(array: np.ndarray) -> mmap.mmap:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, memoryview)
    assert isinstance(base.obj, mmap.mmap)
    return base.obj


@pytest.mark.parametrize("shape", [(0,), (3,), (1, 65536), (100003,), (1000, 5003), (17 * MIB,)])
def test_jax_shares_arrays_of_every_size(shape: tuple[int, ...]) -> None:
    array = aligned_empty(shape, FLOAT)
    assert (array.shape, array.dtype) == (shape, FLOAT)
    array[...] = 1
    placed = jax.device_put(array, jax.devices("cpu")[0], may_alias=True)
    assert array.size == 0 or placed.unsafe_buffer_pointer() == array.ctypes.data


def test_arrays_made_by_several_threads_do_not_overlap() -> None:
    def fill(value: int) -> np.ndarray:
        array = aligned_empty((MIB + value,), np.dtype(np.uint8))
        array[...] = value
        return array

    with ThreadPoolExecutor(8) as threads:
        arrays = list(threads.map(fill, range(200)))
    assert all((array == value).all() for value, array in enumerate(arrays))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_small_matrices_share_a_chunk_that_is_freed_with_the_last_of_them() -> None:
    arrays = [aligned_empty((3 * MIB,), np.dtype(np.uint8)) for _ in range(64)]
    chunks = weakref.WeakSet(mapping_of(array) for array in arrays)
    assert len(chunks) <= 5
    del arrays[1:]
    gc.collect()
    assert len(chunks) <= 2, "that of the first array, and the one that is not full"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_large_arrays_ask_for_huge_pages() -> None:
    array = aligned_empty((80 * MIB,), np.dtype(np.uint8))
    place, flags, is_inside = array.ctypes.data, "", False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            first = line.split()[0]
            if "-" in first:
                start, end = (int(number, 16) for number in first.split("-"))
                is_inside = start <= place < end
            elif is_inside and first == "VmFlags:":
                flags = line
    if not flags:
        pytest.skip("this kernel tells no flags")
    assert "hg" in flags.split()
