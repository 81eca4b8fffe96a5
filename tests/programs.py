"""The compiled programs of a test run: engines and servers of the same shapes share them, whatever process they are in.

A program's key covers its sources, versions and settings, so a run may also begin with what an earlier one left:
`make` keeps them in the environment's folder, plain pytest in one that is gone afterwards. Tests that are about cold
starts or about the cache itself use a directory of their own.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "JAXSERVE_TEST_PROGRAMS"


def shared_programs() -> Path:
    """The `--compile-cache` of whoever has no reason for another."""
    return Path(os.environ[VARIABLE])
