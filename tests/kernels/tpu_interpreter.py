"""Kernels for TPUs on the CPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from jax.experimental.pallas import tpu as pltpu

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options for XLA: an interpreted kernel runs for milliseconds and compiles for seconds."""


@contextlib.contextmanager
def tpu_interpreter(num_cores: int) -> Iterator[None]:
    """Kernels run in the interpreter, and no two accesses to memory race; jax before 0.12 only prints those."""
    printed = io.StringIO()
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=num_cores)
    try:
        with pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(printed):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    assert "RACE" not in printed.getvalue()
