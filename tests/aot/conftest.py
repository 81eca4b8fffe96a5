"""libtpu reads its surroundings when it is loaded; here there are none to ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.tools.planning.targets import TPU_ENVIRONMENT


@pytest.fixture(scope="session", autouse=True)
def no_tpu_machine() -> Iterator[None]:
    """Values that keep libtpu from asking the network what machine this is, and from writing logs to /tmp."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TPU_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
