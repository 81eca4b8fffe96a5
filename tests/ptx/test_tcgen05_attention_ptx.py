"""Attention on `tcgen05` by the PTX that the compiler makes for a B200: against dense softmax, in several orders of events.

What happens in the process is described in tests/ptx/blackwell.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.aot.devices import B200
from tests.e2e.http_server import ROOT, SOURCES
from tests.ptx.blackwell import BLACKWELL

pytestmark = [pytest.mark.aot, pytest.mark.slow]


def _process(*words: str) -> dict[str, Any]:
    if not B200.has_compiler:
        pytest.skip(f"{B200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    command = [sys.executable, "-m", "tests.ptx.blackwell", *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": SOURCES}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_segments_equal_dense_softmax_in_any_order() -> None:
    errors = _process()
    assert list(errors) == [str(case) for case in BLACKWELL]
    assert all(error <= 1 for error in errors.values()), errors


@pytest.mark.exhaustive
def test_waits_commits_and_fences_that_are_missing_are_caught() -> None:
    found = _process("mutants")
    assert found["tried"] > 30
    assert found["missed"] == []
