"""How `make kernels-check` shares its tests among processes (pytest's `-p tests.aot.workers`).

Tests of one file with the same parameters share a program that takes many seconds to compile: they stay in one worker,
and everything else goes to whoever is free.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class ByCase(LoadScopeScheduling):
    """Most tests first; then as they come."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        _, bracket, case = test.partition("[")
        return f"{file}[{case}" if bracket else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByCase:
    return ByCase(config, log)
