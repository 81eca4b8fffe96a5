"""Numbers are measured at most once a second."""

from __future__ import annotations

from jaxserve.executor.measured import PERIOD_S, Measured, resident_bytes


def test_a_number_is_measured_again_after_a_second() -> None:
    now, values = [0.0], iter(range(9))
    number = Measured(lambda: next(values), lambda: now[0])
    assert [number.value, number.value] == [0, 0]
    now[0] = PERIOD_S
    assert [number.value, number.value] == [1, 1]


def test_the_resident_memory_of_this_process_is_more_than_that_of_an_interpreter() -> None:
    assert 10 << 20 < resident_bytes() < 1 << 40
