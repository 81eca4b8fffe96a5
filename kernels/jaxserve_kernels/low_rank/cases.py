"""Conformance cases of low-rank additions, against float64. Padding rows of the activations hold NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.low_rank.api import add_low_rank
from jaxserve_kernels.ops import as_arrays

_TOLERANCE = 1e-6
"""Largest error of a result, relative to the sum of its terms' sizes: products are added in float32."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows with these adapters of equal rank; -1: a row without one."""

    adapters: tuple[int, ...]
    rank: int = 16
    num_adapters: int = 3
    padding: int = 2
    num_inputs: int = 48
    num_outputs: int = 71
    dtype: str = "float32"
    """Dtype of the weights. Activations are in float32."""

    def __str__(self) -> str:
        rows = ".".join("none" if each < 0 else str(each) for each in self.adapters)
        return f"{rows}-{self.num_adapters}x{self.rank}-{self.num_inputs}x{self.num_outputs}-{self.dtype}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    y: np.ndarray
    x: np.ndarray
    down: np.ndarray
    up: np.ndarray
    own: np.ndarray


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    num_rows, num_ranks = len(case.adapters) + case.padding, case.num_adapters * case.rank
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    x = normal(num_rows, case.num_inputs)
    x[len(case.adapters) :] = np.nan
    adapters = np.array([*case.adapters, *[0] * case.padding])[:, None]
    own = np.arange(num_ranks) // case.rank == adapters
    down, up = normal(num_ranks, case.num_inputs), normal(num_ranks, case.num_outputs)
    return Operands(normal(num_rows, case.num_outputs), x, down.astype(dtype), up.astype(dtype), own)


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T O"]:
    """Add to the rows of a case. See `ops.OpCases`."""
    y, x, down, up, own = as_arrays(given)
    return add_low_rank([y], x, [down], [up], own, jnp.int32(len(case.adapters)), backend=backend)[0]


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to the tolerance. See `ops.OpCases`."""
    rows = slice(len(case.adapters))
    y, x, own = given.y[rows].astype(np.float64), given.x[rows].astype(np.float64), given.own[rows]
    down, up = given.down.astype(np.float64).T, given.up.astype(np.float64)
    exact = y + np.where(own, x @ down, 0) @ up
    sizes = np.abs(y) + np.where(own, np.abs(x) @ np.abs(down), 0) @ np.abs(up)
    difference = np.abs(np.asarray(out, np.float64)[rows] - exact) / sizes
    return float(np.nan_to_num(difference, nan=np.inf).max()) / _TOLERANCE


CASES = (
    *(Case((1, -1, 0, 2, 2), dtype=dtype) for dtype in ("float32", "float16", "bfloat16")),
    Case((0,), num_adapters=1, padding=0),
    Case((-1, -1)),
    Case((1, 0, 0, -1, 1, 1, 0, 0, 1, 0), rank=48, num_adapters=2, num_inputs=80, num_outputs=128),
)
"""Every type of weights, rows without adapters, one row alone, outputs that are left over, and more ranks."""
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ("native",)
