"""Conformance cases of matmuls with 8-bit weights, with operands and the answer in float64.

Operands are made by numpy from a seed. Padding rows of the activations hold NaN, which may not reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.matmul.api import matmul
from jaxserve_kernels.matmul.tuning import SkinnyTuning
from jaxserve_kernels.ops import as_arrays

TOLERANCES = {"bfloat16": 1e-5, "float16": 1e-5, "int8": 1e-6, "float8_e4m3fn": 1e-3}
"""Largest error of a result, relative to the sum of its terms' sizes, by type of the activations: products of two numbers
are exact, and added in float32 or int32; but those of e4m3 by e4m3 with about 14 bits if Hopper adds them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One matmul of `num_tokens` rows and as many of padding as `padding` says.

    dtype: of the activations; that of the weights, where both are multiplied as they are.
    """

    num_tokens: int
    num_outputs: int
    num_inputs: int
    weights: str = "int8"
    dtype: str = "bfloat16"
    padding: int = 0

    def __str__(self) -> str:
        rows = f"{self.num_tokens}+{self.padding}" if self.padding else str(self.num_tokens)
        return f"{rows}x{self.num_inputs}x{self.num_outputs}-{self.weights}-{self.dtype}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    x: np.ndarray  # (T, I)
    weight: np.ndarray  # (O, I)
    scales: np.ndarray  # (O,)


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands of a case; those of 8 bits are all numbers that their type has, but NaN."""
    random = np.random.default_rng(seed)
    shape = (case.num_tokens + case.padding, case.num_inputs)
    if case.dtype == case.weights:
        x = _codes(random, shape, case.dtype)
    else:
        x = random.standard_normal(shape).astype(_dtype(case.dtype))
        x[case.num_tokens :] = np.nan
    weight = _codes(random, (case.num_outputs, case.num_inputs), case.weights)
    return Operands(x, weight, random.uniform(0.001, 0.01, case.num_outputs).astype(np.float32))


def expected(case: Case, given: Operands) -> tuple[np.ndarray, np.ndarray]:
    """The answer for the rows that are no padding, and the sums of its products' sizes: (T, O)."""
    x, weight = given.x[: case.num_tokens].astype(np.float64), given.weight.astype(np.float64).T * given.scales
    return x @ weight, np.abs(x) @ np.abs(weight)


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "T O"]:
    """Multiply the operands of a case. See `ops.OpCases`."""
    x, weight, scales = as_arrays(given)
    if not is_emulated:
        return matmul(x, weight, scales, backend=backend)
    from jaxserve_kernels.matmul.gpu import skinny  # imports Pallas

    # Few programs, so that each computes parts of several blocks, and few stages, so that each is used again.
    sizes = SkinnyTuning(rows=64, tile=128, stages=2, programs=3)
    result: jax.Array = skinny.matmul(x, weight, tuning=sizes, is_emulated=True) * scales
    return result


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCES. See `ops.OpCases`."""
    wanted, sizes = expected(case, given)
    difference = np.abs(np.asarray(out, np.float64)[: case.num_tokens] - wanted) / sizes
    return float(np.nan_to_num(difference, nan=np.inf).max()) / TOLERANCES[case.dtype]


def _codes(random: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    numbers = random.integers(0, 256, shape).astype(np.uint8).view(_dtype(dtype))
    return np.where(np.isfinite(numbers.astype(np.float32)), numbers, numbers.dtype.type(1))


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


CASES = (
    Case(3, 256, 384, padding=5),
    Case(1, 384, 640, weights="float8_e4m3fn"),
    Case(33, 256, 256, dtype="float16", padding=7),
    Case(7, 128, 512, weights="float8_e4m3fn", dtype="float16", padding=1),
)
"""Token counts that fill no tile of the tensor cores, all types of weights; shares that end inside of a block of outputs."""
ROUNDED_CASES = (
    Case(9, 256, 384, dtype="int8"),
    Case(2, 256, 512, weights="float8_e4m3fn", dtype="float8_e4m3fn"),
)
"""Rounded activations, as only kernels take them."""
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ("mosaic_gpu",)
