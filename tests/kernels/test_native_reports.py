"""The host reads the tokens of a loop on the device before the loop ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jaxserve_kernels import native
from jaxserve_kernels.native.build import BuildError, build
from jaxtyping import Array

NUM_STEPS = 5
FIRST = np.array([3, 10, 20], np.int32)


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    assert native.register() is not None


@pytest.fixture
def reports() -> Iterator[native.Reports]:
    made = native.Reports()
    yield made
    made.close()


def loop(tokens: Array, gate: threading.Semaphore | None = None) -> Array:
    """Add one to each token in every step; each step but the first waits for the gate."""

    def wait() -> np.bool_:
        assert gate is None or gate.acquire(timeout=60)
        return np.True_

    def step(number: Array, tokens: Array) -> Array:
        if gate is not None:
            is_open = jax.lax.cond(
                number > 0,
                lambda: io_callback(wait, jax.ShapeDtypeStruct((), jnp.bool_)),
                lambda: jnp.bool_(True),
            )
            tokens = jnp.where(is_open, tokens, 0)
        return native.report(tokens + 1, number, number == NUM_STEPS - 1)

    done: Array = jax.lax.fori_loop(0, NUM_STEPS, step, tokens)
    return done


def test_each_step_is_read_while_the_next_one_has_not_begun(reports: native.Reports) -> None:
    gate = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as thread:  # programs with callbacks run in the thread that calls them
        result = thread.submit(lambda: np.asarray(jax.jit(lambda tokens: loop(tokens, gate))(FIRST)))
        for number in range(1, NUM_STEPS):
            found = reports.next(len(FIRST), lambda: False)
            assert found is not None
            assert found.tolist() == (FIRST + number).tolist()
            assert not result.done()
            gate.release()
        assert reports.next(len(FIRST), lambda: False) is None, "the last step comes with the result"
        assert result.result().tolist() == (FIRST + NUM_STEPS).tolist()


def test_the_next_loop_is_read_from_its_first_step(reports: native.Reports) -> None:
    """Whatever was read of the one before, which ends when the next one has reported already."""
    compiled, num_rows = jax.jit(loop), len(FIRST)
    for num_read in (0, 1, NUM_STEPS):
        first = compiled(FIRST).block_until_ready()
        for _ in range(num_read):
            reports.next(num_rows, first.is_ready)
        second = compiled(FIRST + 50).block_until_ready()
        reports.end(num_rows)
        for number in range(1, NUM_STEPS):
            found = reports.next(num_rows, second.is_ready)
            assert found is not None
            assert found.tolist() == (FIRST + 50 + number).tolist()
        reports.end(num_rows)
    assert reports.next(num_rows, lambda: True) is None


def test_nothing_is_read_after_a_report_was_lost(reports: native.Reports) -> None:
    compiled, num_rows = jax.jit(loop), len(FIRST)
    result = compiled(FIRST).block_until_ready()
    os.read(reports._file, 4 * (2 + num_rows))
    for _ in range(3):
        assert reports.next(num_rows, result.is_ready) is None
        reports.end(num_rows)
        result = compiled(FIRST).block_until_ready()
    assert np.asarray(result).tolist() == (FIRST + NUM_STEPS).tolist()


def test_loops_wait_for_no_reader(reports: native.Reports) -> None:
    compiled = jax.jit(loop)
    for _ in range(1000):  # more than a pipe holds
        result = compiled(FIRST)
    assert np.asarray(result).tolist() == (FIRST + NUM_STEPS).tolist()


def test_nothing_is_waited_for_after_a_loop_that_failed(reports: native.Reports) -> None:
    assert reports.next(len(FIRST), lambda: True) is None


def test_loops_run_where_no_client_reads() -> None:
    native.Reports().close()
    assert np.asarray(jax.jit(loop)(FIRST)).tolist() == (FIRST + NUM_STEPS).tolist()
