"""Zeroed arrays whose memory comes later: they are zeros whatever was there before, and providing it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.native.memory import PIECE_BYTES, pauses_per_piece, provide_pieces

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
native.MemoryProvider([array]).join()
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
    native.MemoryProvider([array]).join()
    assert np.array_equal(array, expected)
    provider = native.MemoryProvider([array])
    array.delete()
    provider.join()


class Recorder:
    """Stands for the system: records the pieces, and the priority of the thread that asks for them."""

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.priorities: set[int] = set()

    def __call__(self, address: int, size: int) -> bool:
        assert size == PIECE_BYTES
        self.pieces.append(address)
        self.priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return True


def test_thread_that_provides_memory_has_the_priority_of_the_others() -> None:
    """Locks of the process would otherwise be held by a thread that does not get a processor for seconds."""
    recorder = Recorder()
    native.MemoryProvider([jnp.zeros((8 << 20,), jnp.uint8)], populate=recorder).join()
    assert len(recorder.pieces) >= 3
    assert recorder.priorities == {os.getpriority(os.PRIO_PROCESS, threading.get_native_id())}


def test_whole_pieces_are_provided_with_pauses_in_proportion_to_their_time() -> None:
    now_s, pauses, recorder = 0.0, list[float](), Recorder()

    def populate(address: int, size: int) -> bool:
        nonlocal now_s
        now_s += 1 + len(recorder.pieces)
        return recorder(address, size)

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    spans = [(5 * PIECE_BYTES - 1, 2 * PIECE_BYTES + 1), (0, PIECE_BYTES - 1), (8 * PIECE_BYTES, PIECE_BYTES)]
    provide_pieces(spans, populate, pause, 4.0, lambda: now_s)
    assert recorder.pieces == [5 * PIECE_BYTES, 6 * PIECE_BYTES, 8 * PIECE_BYTES]
    assert pauses == [4.0 * seconds for seconds in (1, 2, 3)]


def test_time_in_which_the_thread_waits_makes_no_pause_longer() -> None:
    """A thread that waits for the interpreter's lock, or for a processor, does no work."""
    pauses = list[float]()

    def populate(address: int, size: int) -> bool:
        time.sleep(0.05)
        return True

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    provide_pieces([(0, 4 * PIECE_BYTES)], populate, pause)
    assert len(pauses) == 4
    assert sum(pauses) < 4 * 0.05


def test_the_thread_takes_a_twentieth_of_all_processors_and_at_most_half_of_one() -> None:
    shares = {count: 1 / (1 + pauses_per_piece(count)) for count in (1, 2, 4, 10, 64)}
    assert shares == {1: 0.1, 2: 0.1, 4: 0.2, 10: 0.5, 64: 0.5}


def test_array_whose_memory_is_gone_does_not_end_the_others() -> None:
    asked = list[int]()

    def populate(address: int, size: int) -> bool:
        asked.append(address)
        return address >= 9 * PIECE_BYTES

    provide_pieces([(0, 4 * PIECE_BYTES), (9 * PIECE_BYTES, 2 * PIECE_BYTES)], populate, lambda seconds: False)
    assert asked == [0, 9 * PIECE_BYTES, 10 * PIECE_BYTES]


def test_provider_waits_while_others_need_the_processors() -> None:
    recorder, was_asked, is_busy = Recorder(), threading.Event(), True

    def asks() -> bool:
        was_asked.set()
        return is_busy

    array = jnp.zeros((16 << 20,), jnp.uint8)
    provider = native.MemoryProvider([array], populate=recorder, is_busy=asks)
    assert was_asked.wait(60)
    assert len(recorder.pieces) == 1
    is_busy = False
    provider.join()
    assert len(recorder.pieces) >= 7


def test_provider_that_waits_for_others_ends_when_it_is_stopped() -> None:
    recorder = Recorder()
    array = jnp.zeros((16 << 20,), jnp.uint8)
    native.MemoryProvider([array], populate=recorder, is_busy=lambda: True).stop()
    assert len(recorder.pieces) == 1


def test_stopped_provider_touches_no_further_piece() -> None:
    recorder, is_made = Recorder(), threading.Event()

    def populate(address: int, size: int) -> bool:
        assert is_made.wait(60)
        assert provider._is_stopped.wait(60)
        return recorder(address, size)

    provider = native.MemoryProvider([jnp.zeros((16 << 20,), jnp.uint8)], populate=populate)
    is_made.set()
    provider.stop()
    assert len(recorder.pieces) == 1
