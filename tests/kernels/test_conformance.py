"""Every op of `jaxserve_kernels` on its cases: the reference, and the kernels that this host runs or interprets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jaxserve_kernels
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.ops import OpCases, ops

from tests.kernels.gpu_interpreter import gpu_interpreter
from tests.kernels.tpu_interpreter import tpu_interpreter

NUM_INTERPRETED = 3
"""Cases of an op that CI interprets for GPUs, which takes up to a minute each: tests/ptx runs the machine code of many more."""


@contextmanager
def _device(backend: Backend) -> Iterator[None]:
    """Interpret the kernels of an accelerator, and fail if their threads race. Skips what this host cannot run."""
    if backend in NATIVE and native.register() is None:
        pytest.skip("the native kernels are not built")
    if backend == "mosaic_gpu":
        with gpu_interpreter() as has_raced:
            yield
            assert not has_raced()
    elif backend == "mosaic_tpu":
        with tpu_interpreter(num_cores=1):
            yield
    else:
        yield


def _runs() -> Iterator[Any]:
    for name, op in ops().items():
        for index, case in enumerate(op.CASES):
            for backend in ("reference", *op.BACKENDS):
                if backend == "mosaic_gpu" and case in getattr(op, "NOT_INTERPRETED", ()):
                    continue
                marks = [pytest.mark.slow] if case in op.SLOW else []
                if backend == "mosaic_gpu" and case not in op.CASES[:NUM_INTERPRETED]:
                    marks.append(pytest.mark.exhaustive)
                if op.BACKENDS == ("bucketed",) and (backend == "bucketed") is not bool(index % 2):
                    marks.append(pytest.mark.exhaustive)  # of one code in two sizes, CI computes each case in one
                yield pytest.param(op, case, backend, id=f"{name}-{backend}-{case}", marks=marks)


def _run(op: OpCases, case: Any, given: Any, backend: Backend) -> Any:
    """Run a case as one program: one for each operation takes three times as long to compile."""
    is_emulated = backend.startswith("mosaic")
    return jax.jit(lambda operands: op.run(case, operands, backend, is_emulated=is_emulated))(given)


@pytest.mark.parametrize(("op", "case", "backend"), list(_runs()))
def test_an_op_computes_its_cases(op: OpCases, case: Any, backend: Backend) -> None:
    given = op.operands(case)
    with _device(backend):
        out = jax.block_until_ready(_run(op, case, given, backend))
    assert op.error(case, given, out) <= 1


def test_every_op_has_a_reference_and_cases() -> None:
    root = Path(jaxserve_kernels.__file__).parent
    folders = {file.parent.name for pattern in ("api.py", "reference.py") for file in root.glob(f"*/{pattern}")}
    assert folders == set(ops())
    assert {file.parent.name for file in root.glob("*/reference.py")} == folders
