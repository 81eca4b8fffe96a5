"""Compiled programs of a test run, shared by all engines and servers of the same shapes in any process.

The key of a program covers its sources, versions and settings, so a run may also use programs of an earlier one: `make`
keeps them in the environment's folder, plain pytest in a temporary folder. Tests of cold starts and of the cache itself
use a folder of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

VARIABLE = "JAXSERVE_TEST_PROGRAMS"


def shared_programs() -> Path:
    """Return the `--compile-cache` for tests that need no folder of their own."""
    return Path(os.environ[VARIABLE])


@contextmanager
def compiled_quickly(*, is_on: bool = True) -> Iterator[None]:
    """Within it, LLVM does not optimise programs for CPUs, as with JAX_DISABLE_MOST_OPTIMIZATIONS=1. is_on: False changes nothing."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", before or is_on)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
