"""Before jax starts: the CPU as four devices, so that tensor parallelism runs here."""

from __future__ import annotations

import os

import jax
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def pytest_configure(config: pytest.Config) -> None:
    """Programs of the fast tests run for milliseconds and compile for seconds: there LLVM does not optimise them.

    What XLA does before, with copies and fusions, is the same. `make test` runs the same tests optimised.
    """
    if config.option.markexpr == "not slow":
        jax.config.update("jax_disable_most_optimizations", True)
