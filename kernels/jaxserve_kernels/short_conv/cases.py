"""Conformance cases of the short convolution, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.segments import cut_segments, decode_segments
from jaxserve_kernels.short_conv.api import short_conv

TOLERANCE = 2e-6
"""Largest absolute error of an output; inputs are around 1."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of these numbers of tokens."""

    counts: tuple[int, ...]
    num_taps: int = 4
    channels: int = 24
    padding: int = 0
    dtype: str = "float32"
    is_decode: bool = False

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "mixed"
        return f"{kind}-{'.'.join(map(str, self.counts))}-{self.num_taps}x{self.channels}-{self.dtype}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    x: np.ndarray
    weight: np.ndarray
    windows: np.ndarray
    starts: np.ndarray


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    x = random.standard_normal((sum(case.counts) + case.padding, case.channels)).astype(dtype)
    weight = random.standard_normal((case.channels, case.num_taps)).astype(dtype)
    windows = random.standard_normal((len(case.counts), case.num_taps - 1, case.channels)).astype(np.float32)
    return Operands(x, weight, windows, np.cumsum((0, *case.counts)).astype(np.int32))


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Any:
    """Convolve the rows of a case. See `ops.OpCases`."""
    x, weight, windows, starts = as_arrays(given)
    if case.is_decode:
        return short_conv(x, weight, windows, decode_segments(starts))
    positions = jnp.zeros(len(case.counts), jnp.int32)
    return short_conv(x, weight, windows, cut_segments(starts, positions, jnp.int32(0), num_tokens=len(x)))


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCE; infinite if a window is not exact. See `ops.OpCases`."""
    found, after = (np.asarray(x, np.float64) for x in out)
    weight, worst = given.weight.astype(np.float64), 0.0
    for row, (start, end) in enumerate(zip(given.starts[:-1], given.starts[1:], strict=True)):
        inputs = np.concatenate([given.windows[row], given.x[start:end].astype(np.float32)]).astype(np.float64)
        count = end - start
        wanted = sum(inputs[tap : tap + count] * weight[:, tap] for tap in range(case.num_taps))
        worst = max(worst, float(np.abs(found[start:end] - wanted).max(initial=0.0)))
        if not np.array_equal(after[row], inputs[count:]):
            return np.inf
    return worst / TOLERANCE if np.isfinite(found).all() else np.inf


CASES = (
    Case((1, 1, 0), padding=1, is_decode=True),
    Case((1, 2, 0, 3, 40), padding=5),
    Case((7, 1), num_taps=3, channels=40, dtype="bfloat16"),
    Case((5, 2), num_taps=2),
)
SLOW: tuple[Case, ...] = CASES[1:]
BACKENDS: tuple[Backend, ...] = ()
