"""Kernels for GPUs on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import pytest


@contextmanager
def gpu_interpreter() -> Iterator[Callable[[], bool]]:
    """Mosaic GPU's interpreter; gives a function that says whether threads raced. Skips where there is none."""
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this jax has no Mosaic GPU")
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip(f"jax {jax.__version__} has no interpreter for Mosaic GPU (make kernels-check has one)")
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield lambda: bool(gpu_callbacks.get_races().races_found)
