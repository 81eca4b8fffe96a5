"""The engine's process imports the modules of its executor without collecting garbage, and never looks through them again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELOAD = """
import gc
from jaxserve.engine import process
before = sum(each["collections"] for each in gc.get_stats())
process.preload()
after = sum(each["collections"] for each in gc.get_stats())
print(after - before, gc.isenabled(), gc.get_freeze_count() > 50_000)
"""


@pytest.mark.slow
def test_preloaded_modules_are_never_searched_for_garbage() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", PRELOAD], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert printed.split() == ["0", "True", "True"]
