"""The words for the end of an engine's process."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.runtime import engine_process
from jaxserve.runtime.engine_process import EngineProcess


def test_an_engine_that_the_kernel_killed_for_lack_of_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([1, 1, 2, 2])
    monkeypatch.setattr(engine_process, "oom_kills", lambda: next(kills))
    process: Any = SimpleNamespace(returncode=-signal.SIGKILL)
    engine = EngineProcess(process)
    assert engine.exit_text == "the engine process was ended by signal 9"
    assert "for lack of memory" in engine.exit_text
    process.returncode = 1
    assert engine.exit_text == "the engine process ended with exit code 1"
