"""Processes that go with their parent, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

CHILD = """
import signal
from jaxserve.parent import die_with_parent
die_with_parent(signal.SIGTERM)
print(flush=True)
signal.pause()
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_gets_its_signal_when_the_parent_ends(number: signal.Signals) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
    try:
        ended, _, _ = select.select([child], [], [], 10.0)
        assert ended == [child]
    finally:
        os.close(child)
