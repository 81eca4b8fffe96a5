"""Profiles of engines that share a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import pytest

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
