"""`jaxserve upgrade --detach`: whose child the new server is, and the exit code of the command that waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, time
from pathlib import Path
from jaxserve.cli import main, upgrade
from jaxserve.errors import StartupError

command = os.getpid()

def family(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid, *map(int, children)}

def serve(configs, *, after_drain, on_done):
    while os.getppid() in family(command):  # the process between them is about to end
        time.sleep(0.01)
    if sys.argv[1] == "serves":
        on_done()
    elif sys.argv[1] == "refuses":
        raise StartupError("no model")
    return 0

upgrade._serve = serve
sys.exit(main.main(["upgrade", "--detach", "--port", "1"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("serves", 0), ("refuses", 2), ("ends", 1)])
def test_the_new_server_is_no_child_of_the_command(what: str, code: int) -> None:
    """systemd takes it for its own only then, and waits for its end when the unit is stopped."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("no model") == (what == "refuses")
    assert done.stderr.count("the new server ended before it had the port") == (what == "ends")
