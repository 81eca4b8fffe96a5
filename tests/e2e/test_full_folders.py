"""Shared memory of 1 MiB, as containers may have, and a full folder of temporary files: a clear error, and work goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.handover import predecessor
from tests.e2e.http_server import ROOT, SOURCES

_MOUNT = 'mount -t tmpfs -o size=1m none /dev/shm && mount -t tmpfs -o size=4m none "$TMPDIR" && exec "$@"'


def _can_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _can_mount(), reason="file systems are mounted as root only")
def test_weights_that_find_no_space_are_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.e2e.weights_without_space", str(tmp_path)]
    with tempfile.TemporaryDirectory(prefix="jsf-") as folder:  # tmp_path is too long for a socket
        environment = os.environ | {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu", "TMPDIR": folder}
        ended = subprocess.run(
            ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", *program],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "No space left on device",
        "The arrays cannot be given to the engine: No space left on device.",
        "tokens 5",
        "version 1",
        "tokens 5",
        "left []",
    ]


def test_an_upgrade_without_any_temporary_folder_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", full)
    message = r"cannot look for the running server: No usable temporary directory .*\(--uds-dir\)"
    with pytest.raises(ConfigError, match=message), predecessor(ServerConfig(port=1)):
        pass
