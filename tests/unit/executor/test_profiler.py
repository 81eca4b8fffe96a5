"""Profiles of engines that share a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.executor.profiler import Profiler


def test_engines_that_share_a_folder_write_to_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX names the files of a profile by host and second."""
    folders: list[str] = []

    def start_trace(folder: str, **_options: Any) -> None:
        folders.append(folder)

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    for process in (71, 72):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        Profiler(str(tmp_path)).start()
    assert [Path(folder).name.rpartition("-")[2] for folder in folders] == ["71", "72"]
    assert {Path(folder).parent for folder in folders} == {tmp_path}


def test_a_profile_that_cannot_be_written_is_kept_for_the_next_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX keeps a profile whose file it cannot write, and writes it when it is asked again."""
    is_full, changes = True, list[bool]()

    def stop_trace() -> None:
        if is_full:
            raise RuntimeError("RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop_trace)
    profiler = Profiler(str(tmp_path), changes.append)
    profiler.start()
    with pytest.raises(InvalidRequestError, match="No space left on device"):
        profiler.stop()
    with pytest.raises(InvalidRequestError, match="being taken already"):
        profiler.start()
    is_full = False
    profiler.stop()
    assert changes == [True, False], "other hosts end theirs once"
    profiler.start()
