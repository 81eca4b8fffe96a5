"""Profiles of engines that share a folder."""

from __future__ import annotations

import os
import socket
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


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_is_lost_and_the_next_one_is_whole(tmp_path: Path) -> None:
    changes = list[bool]()
    profiler = Profiler(str(tmp_path), changes.append)
    folder = Path(tmp_path, f"{socket.gethostname()}-{os.getpid()}")
    folder.mkdir()
    (folder / "plugins").write_text("a file where JAX makes a folder")
    profiler.start()
    with pytest.raises(InvalidRequestError, match="is lost"):
        profiler.stop()
    assert changes == [True, False]
    with pytest.raises(InvalidRequestError, match="No profile is being taken"):
        profiler.stop()
    with pytest.raises(InvalidRequestError, match="is lost"):
        profiler.start()
    (folder / "plugins").unlink()
    profiler.start()
    jax.block_until_ready(jax.numpy.ones(3) + 1)
    profiler.stop()
    sizes = [file.stat().st_size for file in folder.rglob("*.xplane.pb")]
    assert max(sizes) > 1000, "bytes of an empty one: 162"
