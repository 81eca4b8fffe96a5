"""Conformance cases of the selective scan, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.segments import cut_segments, decode_segments
from jaxserve_kernels.selective_scan.api import selective_scan
from jaxserve_kernels.selective_scan.reference import Scanned
from jaxserve_kernels.states import PooledStates

TOLERANCE = 2e-6
"""Largest error of outputs and states, relative to the largest number."""
LAYER = 1
"""The layer of a pool, of two, whose states a case takes."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of these numbers of tokens, whose texts are `positions` tokens long before."""

    counts: tuple[int, ...]
    positions: tuple[int, ...]
    num_channels: int = 24
    state_dim: int = 16
    padding: int = 0
    is_decode: bool = False
    step: float = 1.0
    """Scale of a token's steps."""
    is_pooled: bool = False
    """The states are in a pool, and rows write the slot after the one that they read."""

    def __str__(self) -> str:
        kind, rows = "decode" if self.is_decode else "mixed", ".".join(map(str, self.counts))
        return f"{kind}-{rows}-{self.num_channels}x{self.state_dim}-{self.step:g}{'-pooled' if self.is_pooled else ''}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    x: np.ndarray
    steps: np.ndarray
    b: np.ndarray
    c: np.ndarray
    rates: np.ndarray
    states: np.ndarray
    starts: np.ndarray
    positions: np.ndarray


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    total, num_rows = sum(case.counts) + case.padding, len(case.counts)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    channels, size = case.num_channels, case.state_dim
    steps = (case.step * random.uniform(0, 1, (total, channels))).astype(np.float32)
    states = normal(num_rows, size, channels)
    if case.is_pooled:
        pool = np.full((LAYER + 1, 2 * num_rows, size, channels), np.nan, np.float32)
        pool[LAYER, ::2] = states
        states = pool
    return Operands(
        normal(total, channels),
        steps,
        normal(total, size),
        normal(total, size),
        -random.uniform(0.1, 16, (size, channels)).astype(np.float32),
        states,
        np.cumsum((0, *case.counts)).astype(np.int32),
        np.asarray(case.positions, np.int32),
    )


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Any:
    """Scan the rows of a case. See `ops.OpCases`."""
    *tokens, rates, states, starts, positions = as_arrays(given)
    if case.is_pooled:
        reads = 2 * jnp.arange(len(case.counts))
        states = PooledStates(states, jnp.int32(LAYER), reads, reads + 1)
    num_single = next((i for i, count in enumerate(case.counts) if count != 1), len(case.counts))
    segments = decode_segments(starts)
    if not case.is_decode:
        segments = cut_segments(starts, positions, jnp.int32(num_single), num_tokens=len(tokens[0]))
    out, after = selective_scan(Scanned(*tokens), rates, states, segments, backend=backend)
    return out, after.pool[LAYER, 1::2] if isinstance(after, PooledStates) else after


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCE. See `ops.OpCases`."""
    found, after = (np.asarray(each, np.float64) for each in out)
    x, steps, b, c, rates, states = (np.asarray(each, np.float64) for each in given[:6])
    wanted, state = np.zeros(found.shape), states[LAYER, ::2] if case.is_pooled else states
    for row, (start, end) in enumerate(zip(given.starts[:-1], given.starts[1:], strict=True)):
        for t in range(start, end):
            state[row] = np.exp(steps[t] * rates) * state[row] + b[t][:, None] * (steps[t] * x[t])
            wanted[t] = c[t] @ state[row]
    if not np.isfinite(found).all():
        return np.inf
    end = given.starts[-1]
    return max(_relative(found[:end], wanted[:end]), _relative(after, state)) / TOLERANCE


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    difference = np.nan_to_num(np.abs(found - wanted), nan=np.inf)
    return float(difference.max(initial=0.0) / max(np.abs(wanted).max(initial=0.0), 1e-30))


CASES = (
    Case((1, 1, 0), (5, 0, 9), padding=1, is_decode=True),
    Case((1, 1, 70, 0, 33, 1, 5), (40, 3, 7, 0, 31, 64, 30), padding=9, step=0.1, is_pooled=True),
    Case((65, 31), (0, 1), num_channels=40, state_dim=5, step=30.0),
    Case((100,), (28,), num_channels=7, step=1e-4),
)
SLOW: tuple[Case, ...] = CASES[2:]
BACKENDS: tuple[Backend, ...] = ("native",)
