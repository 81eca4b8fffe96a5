"""Kernels are interpreted by programs of the CPU that run for milliseconds and compile for seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs import compiled_quickly


@pytest.fixture(autouse=True)
def quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """In lanes that compile for accelerators, LLVM optimises the programs of other folders."""
    with compiled_quickly(is_on=request.node.get_closest_marker("optimized") is None):
        yield
