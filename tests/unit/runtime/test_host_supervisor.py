"""The supervisor of a host's worker: how long the worker may be silent."""

from __future__ import annotations

from jaxserve.ipc.engine_spec import BEAT, SERVING_BEAT
from jaxserve.runtime.host_supervisor import Silence


def polls_until_frozen(silence: Silence) -> int:
    """Return the number of polls, two a second, without a sign of life after which the worker counts as frozen."""
    return next(number for number in range(1, 10000) if silence.is_too_long())


def test_a_worker_that_imports_has_the_time_of_a_start() -> None:
    assert polls_until_frozen(Silence(startup_timeout_s=900.0, host_timeout_s=5.0)) == 1801


def test_a_worker_that_compiles_may_be_silent_for_a_minute() -> None:
    silence = Silence(startup_timeout_s=900.0, host_timeout_s=5.0)
    for beats in (BEAT, BEAT * 7):
        silence.end(beats)
        assert polls_until_frozen(silence) == 121


def test_a_worker_that_serves_is_frozen_after_twice_the_time_of_a_lost_host() -> None:
    silence = Silence(startup_timeout_s=900.0, host_timeout_s=5.0)
    for beats in (BEAT + SERVING_BEAT + BEAT, BEAT):
        silence.end(beats)
        assert polls_until_frozen(silence) == 21
