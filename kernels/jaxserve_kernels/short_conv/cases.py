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
from jaxserve_kernels.states import PooledStates

LAYER = 1
"""The layer of a pool, of two, whose windows a case takes."""
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
    has_bias: bool = False
    is_silu: bool = False
    sizes: tuple[int, ...] | None = None
    """Channels of the arrays that are returned."""
    is_pooled: bool = False
    """Windows are in a pool: every other row writes another slot than it reads, and the third one none."""

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "mixed"
        form = (
            ("-bias" if self.has_bias else "")
            + ("-silu" if self.is_silu else "")
            + ("-pooled" if self.is_pooled else "")
        )
        return f"{kind}-{'.'.join(map(str, self.counts))}-{self.num_taps}x{self.channels}-{self.dtype}{form}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    windows: np.ndarray
    """The windows of rows, or a pool with them in its layer LAYER."""
    reads: np.ndarray | None
    """Slots of rows in a pool; None without one."""
    writes: np.ndarray | None
    starts: np.ndarray


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    x = random.standard_normal((sum(case.counts) + case.padding, case.channels)).astype(dtype)
    weight = random.standard_normal((case.channels, case.num_taps)).astype(dtype)
    bias = random.standard_normal(case.channels).astype(dtype) if case.has_bias else None
    num_rows = len(case.counts)
    windows = random.standard_normal((num_rows, case.num_taps - 1, case.channels)).astype(np.float32)
    reads = writes = None
    if case.is_pooled:
        places, num_slots = np.arange(num_rows), 2 * num_rows
        pool = np.full((LAYER + 1, num_slots, *windows.shape[1:]), np.nan, np.float32)
        reads = 2 * places.astype(np.int32)
        pool[LAYER, reads] = windows
        windows, others = pool, np.where(np.asarray(case.counts) > 0, places % 2, 0)
        writes = np.where(places == 2, num_slots, reads + others).astype(np.int32)
    return Operands(x, weight, bias, windows, reads, writes, np.cumsum((0, *case.counts)).astype(np.int32))


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Any:
    """Convolve the rows of a case. See `ops.OpCases`."""
    x, weight, bias, windows, reads, writes, starts = as_arrays(given)
    if case.is_pooled:
        windows = PooledStates(windows, jnp.int32(LAYER), reads, writes)
    segments = decode_segments(starts)
    if not case.is_decode:
        positions = jnp.zeros(len(case.counts), jnp.int32)
        segments = cut_segments(starts, positions, jnp.int32(0), num_tokens=len(x))
    options: dict[str, Any] = {"sizes": case.sizes, "is_silu": case.is_silu, "backend": backend}
    parts, after = short_conv(x, weight, bias, windows, segments, **options)
    return jnp.concatenate(parts, 1), after.pool if isinstance(after, PooledStates) else after


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCE; infinite if a window is not exact. See `ops.OpCases`."""
    found, after = (np.asarray(x, np.float64) for x in out)
    weight, worst = given.weight.astype(np.float64), 0.0
    before, others = given.windows.astype(np.float64), np.copy(after)
    if given.reads is not None and given.writes is not None:
        before, after = before[LAYER, given.reads], after[LAYER]
    for row, (start, end) in enumerate(zip(given.starts[:-1], given.starts[1:], strict=True)):
        inputs = np.concatenate([before[row], given.x[start:end].astype(np.float64)])
        count = end - start
        wanted = sum(inputs[tap : tap + count] * weight[:, tap] for tap in range(case.num_taps))
        if given.bias is not None:
            wanted = wanted + given.bias.astype(np.float64)
        if case.is_silu:
            wanted = wanted / (1 + np.exp(-wanted))
        worst = max(worst, float(np.abs(found[start:end] - wanted).max(initial=0.0)))
        slot = row if given.writes is None else given.writes[row]
        if slot < len(after) and not np.array_equal(after[slot], inputs[count:]):
            return np.inf
    if given.writes is not None and not _is_kept(given, others):
        return np.inf
    return worst / TOLERANCE if np.isfinite(found).all() else np.inf


def _is_kept(given: Operands, after: np.ndarray) -> bool:
    """Return True if no slot of the pool has changed but those that rows write."""
    before = given.windows.astype(np.float64)
    slots = given.writes[given.writes < before.shape[1]] if given.writes is not None else ()
    after[LAYER, slots] = before[LAYER, slots] = 0
    return np.array_equal(after, before, equal_nan=True)


CASES = (
    Case((1, 1, 0), padding=1, is_decode=True),
    Case((1, 2, 0, 3, 40), padding=5),
    Case((7, 1), num_taps=3, channels=40, dtype="bfloat16"),
    Case((5, 2), num_taps=2),
    Case((1, 1, 1, 1, 0), padding=1, channels=150, sizes=(20, 130), is_silu=True, is_decode=True, is_pooled=True),
    Case((1, 2, 0, 3, 140), padding=5, channels=333, sizes=(300, 1, 32), has_bias=True, is_silu=True, is_pooled=True),
)
SLOW: tuple[Case, ...] = CASES[1:4]
BACKENDS: tuple[Backend, ...] = ("native",)
