"""Scheduler of tests for pytest-xdist, in lanes that compile for accelerators (pytest's `-p tests.aot.workers`).

Tests of one file with the same parameters share a program that takes many seconds to compile, so they stay in one
worker; each other test goes to any worker that is free.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class ByCase(LoadScopeScheduling):
    """Groups of tests with the same file and parameters, the largest first."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        _, bracket, case = test.partition("[")
        return f"{file}[{case}" if bracket else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByCase:
    return ByCase(config, log)
