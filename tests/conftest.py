"""Before jax starts: the CPU as four devices, so that tensor parallelism runs here; and a place for compiled programs."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version

import jax
import pytest

from tests.programs import VARIABLE

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1" and version("jaxlib").startswith("0.10."):
    # There XLA's older emitters of fused loops remain, which compile twice as fast. Servers inherit it.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def pytest_configure(config: pytest.Config) -> None:
    if VARIABLE not in os.environ:  # workers find what the first process made
        folder = tempfile.TemporaryDirectory(prefix="jaxserve-programs-", ignore_cleanup_errors=True)
        os.environ[VARIABLE] = folder.name
        config.add_cleanup(folder.cleanup)
