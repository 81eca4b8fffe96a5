"""The words for the end of an engine's process."""

from __future__ import annotations

import signal
import sys

import pytest

from jaxserve.runtime import spawn
from jaxserve.runtime.engine_process import EngineProcess


@pytest.mark.parametrize(("num_kills", "number"), [(1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGTERM)])
def test_an_engine_that_the_kernel_killed_for_lack_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, num_kills: int, number: int
) -> None:
    """It may die before it gets its specification: while it imports its modules."""
    kills = iter([1, num_kills])
    monkeypatch.setattr(spawn, "oom_kills", lambda: next(kills))
    with spawn.Spawned([sys.executable, "-c", "input()"], stdin=-1) as process:
        process.send_signal(number)
        process.wait()
        text = EngineProcess(process).exit_text
    assert text.startswith(f"the engine process was ended by signal {number:d}")
    assert ("for lack of memory" in text) == (num_kills == 2 and number == signal.SIGKILL)
