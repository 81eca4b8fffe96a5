"""The supervisor of a host's worker: how long the worker may be silent."""

from __future__ import annotations

from jaxserve.ipc.engine_spec import BEAT, SERVING_BEAT
from jaxserve.runtime.host_supervisor import Silence


def polls_until_frozen(silence: Silence) -> int:
    """Return the number of polls without a sign of life after which the worker counts as frozen."""
    return next(number for number in range(1, 1000) if silence.is_too_long())


def test_a_worker_that_compiles_may_be_silent_for_a_minute() -> None:
    silence = Silence(host_timeout_s=5.0)
    assert polls_until_frozen(silence) == 121
    silence.end(BEAT * 7)
    assert polls_until_frozen(silence) == 121


def test_a_worker_that_serves_is_frozen_after_twice_the_time_of_a_lost_host() -> None:
    silence = Silence(host_timeout_s=5.0)
    silence.end(BEAT + SERVING_BEAT + BEAT)
    assert polls_until_frozen(silence) == 21
    silence.end(BEAT)
    assert polls_until_frozen(silence) == 21
