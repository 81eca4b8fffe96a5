"""Conformance cases of rotation, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.rope.reference import Rotation, rotate

TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest absolute error of a result; inputs are around 1."""


@dataclass(frozen=True, slots=True)
class Case:
    """The heads of `num_tokens` tokens."""

    num_tokens: int
    num_heads: int = 3
    dim: int = 64
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.num_heads}x{self.dim}-{self.dtype}"


class Operands(NamedTuple):
    """Arrays of one call."""

    x: np.ndarray  # (T, N, H)
    angles: np.ndarray  # (T, H/2), float32


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random heads, and angles of positions up to 8192. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((case.num_tokens, case.num_heads, case.dim))
    angles = random.uniform(0, 8192, (case.num_tokens, case.dim // 2)).astype(np.float32)
    return Operands(x.astype(np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))), angles)


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T N H"]:
    """Rotate the heads of a case. See `ops.OpCases`."""
    x, angles = as_arrays(given)
    return rotate(x, Rotation(jnp.cos(angles), jnp.sin(angles)))


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCES. See `ops.OpCases`."""
    x, angles = given.x.astype(np.float64), given.angles.astype(np.float64)[:, None]
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    wanted = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    difference = np.abs(np.asarray(out, np.float64) - wanted)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)) / TOLERANCES[case.dtype]


CASES = (Case(50), Case(1, dim=128, dtype="bfloat16"), Case(7, dim=80, dtype="float16"))
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ()
