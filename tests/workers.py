"""Distribution of tests to the workers of pytest-xdist (pytest's `-p tests.workers`).

The tests of a file share engines and servers, so they stay in one worker and in their order. In folders whose tests share
no more than a program, each case of a file goes to any worker that is free: those that compile for accelerators have
many seconds of compiling in common with the same parameters, those of models and kernels compile programs of their own, and
each model of `tests/trained` is trained by one worker.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

BY_CASE = ("tests/aot/", "tests/kernels/", "tests/models/", "tests/ptx/", "tests/trained/")
BY_FILE = ("tests/aot/test_tcgen05.py",)
"""Files in these folders whose cases share what takes longer than all of them."""
ONE_ENGINE = tuple(
    f"tests/engine/test_{name}.py"
    for name in (
        "model_engine",
        "overlap",
        "processed_logprobs",
        "prompt_logprobs",
        "sampling_options",
        "flight_record",
    )
)
"""Files that share the engine of `tests/engine/conftest.py`, whose programs take longer to compile than their tests."""
ARCHITECTURE = "tests/architecture/"
"""Files that share the parsed sources of the program, which take longer to parse than their tests."""


class Distribution(LoadScopeScheduling):
    """Groups of tests that stay together: by file, with those of ONE_ENGINE and of ARCHITECTURE in one; in BY_CASE, but for BY_FILE, by parameters, too."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file in ONE_ENGINE:
            return ONE_ENGINE[0]
        if file.startswith(ARCHITECTURE):
            return ARCHITECTURE
        if file in BY_FILE or not file.startswith(BY_CASE):
            return file
        _, bracket, case = test.partition("[")
        return f"{file}[{case}" if bracket else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Distribution:
    return Distribution(config, log)
