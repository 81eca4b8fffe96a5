"""A kernel op is one folder: it is found, checked against its reference, and benchmarked without an entry anywhere."""

from __future__ import annotations

import pytest

from tests.additions.overlay import Overlay, unnamed

pytestmark = pytest.mark.slow

FOLDER = "kernels/jaxserve_kernels/clipped_relu"
REFERENCE = '''"""Clipped ReLU in plain jax.numpy: the specification."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def clipped_relu(x: Float[Array, "T D"], limit: float) -> Float[Array, "T D"]:
    """Return x, not below 0 and not above `limit`."""
    return jnp.clip(x, 0, limit)
'''
API = '''"""Public entry of clipped_relu."""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.clipped_relu import reference


def clipped_relu(x: Float[Array, "T D"], limit: float, *, backend: Backend = "reference") -> Float[Array, "T D"]:
    """Return x, not below 0 and not above `limit`."""
    if backend == "mosaic_gpu":
        from jaxserve_kernels.clipped_relu.gpu import kernel

        return kernel.clipped_relu(x, limit)
    return reference.clipped_relu(x, limit)
'''
GPU = '''"""Clipped ReLU on GPUs."""

from __future__ import annotations

from functools import partial

import jax


@partial(jax.jit, static_argnames="limit")
def clipped_relu(x: jax.Array, limit: float) -> jax.Array:
    """Return x, not below 0 and not above `limit`."""
    out: jax.Array = jax.numpy.minimum(jax.numpy.maximum(x, 0), limit)
    return out
'''
CASES = '''"""Conformance cases of clipped_relu."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.clipped_relu.api import clipped_relu
from jaxserve_kernels.ops import as_arrays

LIMIT = 0.5


class Case(NamedTuple):
    """A matrix of `shape`."""

    shape: tuple[int, int]

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


class Operands(NamedTuple):
    """Arrays of one call."""

    x: np.ndarray


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random numbers. See `ops.OpCases`."""
    return Operands(np.random.default_rng(seed).standard_normal(case.shape).astype(np.float32))


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> jax.Array:
    """Clip the operands of a case. See `ops.OpCases`."""
    return clipped_relu(as_arrays(given).x, LIMIT, backend=backend)


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to 1e-6. See `ops.OpCases`."""
    return float(np.abs(np.asarray(out) - np.minimum(np.maximum(given.x, 0), LIMIT)).max()) / 1e-6


CASES = (Case((3, 4)), Case((1, 1)))
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ("mosaic_gpu",)
'''
CALL_AND_CHECKS = """
from argparse import Namespace
from unittest.mock import patch
import jax
from benchmarks.gpu import kernels
from jaxserve_kernels.clipped_relu import clipped_relu
print(clipped_relu(jax.numpy.ones((1, 1)), 0.5))
patch.object(kernels, "op_backends", lambda *_: ("reference",)).start()
print(*kernels.checks(Namespace(is_quick=True)), sep="\\n")
"""
INIT = '''"""ReLU with an upper limit."""

from jaxserve_kernels.clipped_relu.api import clipped_relu

__all__ = ["clipped_relu"]
'''


def test_a_kernel_op_is_one_folder(overlay: Overlay) -> None:
    files = {"__init__": INIT, "api": API, "reference": REFERENCE, "cases": CASES, "gpu/kernel": GPU}
    for name, text in files.items():
        overlay.add(f"{FOLDER}/{name}.py", text)
    overlay.add(f"{FOLDER}/gpu/__init__.py", '"""Pallas kernels of clipped_relu."""\n')
    assert unnamed(overlay, "a kernel op") == set()
    tested = overlay.run(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/kernels/test_conformance.py",
        "tests/architecture/test_imports.py",
        "-rA",
        "-k",
        "clipped_relu or has_cases or test_imports and (jit or kernels)",
    )
    for name in (
        "kernels/test_conformance.py::test_an_op_computes_its_cases[clipped_relu-reference-3x4]",
        "kernels/test_conformance.py::test_an_op_computes_its_cases[clipped_relu-reference-1x1]",
        "architecture/test_imports.py::test_jit_stands_only_in_runner_steps",
        "architecture/test_imports.py::test_kernels_never_import_the_server",
    ):
        assert f"PASSED tests/{name}" in tested
    printed = overlay.run("-c", CALL_AND_CHECKS).splitlines()
    assert printed[0] == "[[0.5]]"
    assert "reference: clipped_relu 3x4" in printed
