"""Conformance cases of segment attention, against float64. Padding holds NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.segment_attention.api import attend_segments

_TOLERANCE = 5e-6
"""Largest error of a result; values are a few units large."""


@dataclass(frozen=True, slots=True)
class Case:
    """Segments of these lengths."""

    lengths: tuple[int, ...]
    padding: int = 3
    num_heads: int = 2
    head_dim: int = 32
    scale: float = 0.3

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.lengths))}+{self.padding}-{self.num_heads}x{self.head_dim}-{self.scale}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    numbers: np.ndarray


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    count = sum(case.lengths)
    arrays = random.standard_normal((3, count + case.padding, case.num_heads, case.head_dim)).astype(np.float32)
    arrays[:, count:] = np.nan
    query, key, value = arrays
    numbers = np.repeat([*range(len(case.lengths)), len(query)], [*case.lengths, case.padding])
    return Operands(query, key, value, numbers.astype(np.int32))


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T N H"]:
    """Attend within the segments of a case. See `ops.OpCases`."""
    count, longest = jnp.int32(sum(case.lengths)), max(case.lengths)
    query, key, value, numbers = as_arrays(given)
    return attend_segments(query, key, value, numbers, count, scale=case.scale, longest=longest, backend=backend)


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to the tolerance. See `ops.OpCases`."""
    largest, begin = 0.0, 0
    for length in case.lengths:
        own = slice(begin, begin + length)
        query, key, value = (array[own].astype(np.float64) for array in given[:3])
        scores = np.einsum("qnh,knh->nqk", query, key) * case.scale
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        exact = np.einsum("nqk,knh->qnh", shares / shares.sum(-1, keepdims=True), value)
        difference = np.abs(np.asarray(out, np.float64)[own] - exact)
        largest, begin = max(largest, float(np.nan_to_num(difference, nan=np.inf).max())), begin + length
    return largest / _TOLERANCE


CASES = (
    Case((1,), padding=0),
    Case((64, 1, 130, 7), num_heads=3),
    Case((100, 3), head_dim=72, scale=72**-0.5),
    Case((300,), num_heads=1, head_dim=20, scale=2.0),
    Case((17, 65), padding=140, head_dim=80),
)
"""One token, blocks of keys that are full or not, groups of queries that are full or not, head dims that fill no vector."""
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ("native",)
