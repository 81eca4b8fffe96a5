"""Zeroed arrays whose memory comes later: they are zeros whatever was there before, and providing it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native

pytestmark = pytest.mark.skipif(native.register() is None, reason="the native kernels are not built")

LARGE = jax.ShapeDtypeStruct((96 << 20,), jnp.uint8)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("size", [1, 3, 4095, 4097, 70_001, 5 << 20])
def test_recycled_memory_reads_as_zeros(size: int) -> None:
    shape = jax.ShapeDtypeStruct((size,), jnp.uint8)
    make = jax.jit(lambda: native.untouched_zeros(shape, shape))
    for _ in range(3):
        halves = [np.asarray(half) for half in make()]
        assert not any(half.any() for half in halves)
        del halves
        full = jnp.full((size,), 7, jnp.uint8).block_until_ready()  # takes, and leaves, the same memory
        del full


MEASURED = """
import jax
from jaxserve_kernels import native
from tests.kernels.test_native_memory import LARGE, resident_bytes
native.register()
make = jax.jit(lambda: native.untouched_zeros(LARGE)[0]).lower().compile()
before = resident_bytes()
array = make().block_until_ready()
made = resident_bytes() - before
native.provide(array).join()
print(made, resident_bytes() - before)
"""


@pytest.mark.slow
def test_memory_comes_when_it_is_provided_and_not_before() -> None:
    command = [sys.executable, "-c", MEASURED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    made, provided = map(int, printed.split())
    assert made < LARGE.size / 4
    assert provided > LARGE.size * 3 / 4


def test_providing_memory_changes_nothing_even_of_an_array_that_is_gone() -> None:
    array = jnp.arange(12 << 20, dtype=jnp.uint8)
    expected = np.array(array)
    native.provide(array).join()
    assert np.array_equal(array, expected)
    thread = native.provide(array)
    array.delete()
    thread.join()
