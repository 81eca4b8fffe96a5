"""The environment of `make clients-check`: client libraries, without the server's dependencies."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

API_KEY = "sk-clients"
"""API key of the server with the default model."""

AFTER_RESULTS = "It is sunny in Paris."
"""Text of the fake model that has called its tools, after their results."""


def require_lane() -> None:
    """Skip the importing module in any other environment."""
    if "JAXSERVE_TEST_PYTHON" not in os.environ:
        pytest.skip("client libraries have an environment of their own: make clients-check", allow_module_level=True)


def library(name: str) -> Any:
    """Return a module of a client library; skip the importing module in any other environment."""
    require_lane()
    return importlib.import_module(name)
