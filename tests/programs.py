"""Compiled programs of a test run, shared by all engines and servers of the same shapes in any process.

The key of a program covers its sources, versions and settings, so a run may also use programs of an earlier one: `make`
keeps them in the environment's folder, plain pytest in a temporary folder. Tests of cold starts and of the cache itself
use a folder of their own.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "JAXSERVE_TEST_PROGRAMS"


def shared_programs() -> Path:
    """Return the `--compile-cache` for tests that need no folder of their own."""
    return Path(os.environ[VARIABLE])
