"""Measures the rates of this machine's CPU, which are not published for a part of a shared machine.

It runs numpy's matmuls for about a second and takes the best run, because other load only slows one down.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jaxserve.tools.planning.devices import Rates

_SECONDS_EACH = 0.5
_VECTOR_SHAPE = (8192, 8192)  # 256 MiB: more than the caches of most machines
_SQUARE = 1536


def measure_cpu_rates() -> Rates:
    """Measure bytes per second of a matrix-vector matmul and operations per second of a square matmul, in float32.

    Other dtypes get the same rate: CPUs compute activations in float32, and the gain of int8 kernels depends on
    instructions that numpy does not use.
    """
    matrix, vector = np.ones(_VECTOR_SHAPE, np.float32), np.ones(_VECTOR_SHAPE[1], np.float32)
    bytes_per_s = matrix.nbytes / _best_seconds(lambda: matrix @ vector)
    square = np.ones((_SQUARE, _SQUARE), np.float32)
    flops = 2 * _SQUARE**3 / _best_seconds(lambda: square @ square)
    return Rates.alike(bytes_per_s, flops, "measured on this machine now, by numpy")


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    best = _seconds(run)
    end = time.perf_counter() + _SECONDS_EACH
    while time.perf_counter() < end:
        best = min(best, _seconds(run))
    return best


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
