"""libtpu reads its surroundings when it is loaded; here there are none to ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_tpu_machine() -> Iterator[None]:
    """Values that keep libtpu from asking the network what machine this is, and from writing logs to /tmp."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        patch.setenv("TPU_LOG_DIR", "disabled")
        yield
