"""Conformance cases of matmuls with the weights of experts, with operands and the answer in float64.

Operands are made by numpy from a seed. Padding rows of the activations hold NaN, and so do the weights of experts
without rows, if their type has it: neither may reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.grouped_matmul.api import grouped_matmul
from jaxserve_kernels.ops import as_arrays

TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-5, "float16": 1e-5}
"""Largest error of a result, relative to the sum of its terms' sizes, by type of the activations: products of two numbers
are exact, and added in float32."""

_GROUPED = {"int4": "int4", "e4m3_groups": "float8_e4m3fn"}
"""Weights in groups, and the type of their numbers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One matmul of the rows of `group_sizes`, and as many of padding as `padding` says.

    weights: their type; int4 has a scale for each output and group of `group` inputs, 8 bits one for each output, e4m3_groups
    is e4m3 with one for each group. mxfp4 has blocks of `group` inputs, its numbers are int4 places; those of mxfp4_bytes are two
    in a byte.
    dtype: of the activations; that of float weights, too.
    """

    group_sizes: tuple[int, ...]
    num_outputs: int
    num_inputs: int
    weights: str = "bfloat16"
    dtype: str = "bfloat16"
    padding: int = 0
    group: int = 64

    def __str__(self) -> str:
        rows = "_".join(map(str, self.group_sizes))
        padding = f"+{self.padding}" if self.padding else ""
        return f"{rows}{padding}x{self.num_inputs}x{self.num_outputs}-{self.weights}-{self.dtype}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    x: np.ndarray  # (R, I)
    weight: np.ndarray  # (E, O, I) or (E, O, I / 2)
    group_sizes: np.ndarray  # (E,)
    scales: np.ndarray | None  # (E, O) or (E, G, O)


def operands(case: Case, seed: int = 0) -> Operands:
    """Random operands of a case; those of 8 and 4 bits are all numbers that their type has, but NaN."""
    random = np.random.default_rng(seed)
    sizes, num_rows = np.array(case.group_sizes, np.int32), sum(case.group_sizes)
    x = random.standard_normal((num_rows + case.padding, case.num_inputs)).astype(_dtype(case.dtype))
    x[num_rows:] = np.nan
    shape = (len(sizes), case.num_outputs, case.num_inputs)
    if case.weights in ("float32", "float16", "bfloat16"):
        weight = random.standard_normal(shape).astype(_dtype(case.weights))
        weight[sizes == 0] = np.nan
        return Operands(x, weight, sizes, None)
    if case.weights.startswith("mxfp4"):
        weight, scales = _mxfp4(random, case)
        scales[sizes == 0] = 255
        return Operands(x, weight, sizes, scales)
    by = (len(sizes), case.num_inputs // case.group, case.num_outputs) if case.weights in _GROUPED else shape[:2]
    scales = random.uniform(0.001, 0.01, by).astype(_dtype(case.dtype) if case.weights == "int4" else np.float32)
    scales[sizes == 0] = np.nan
    return Operands(x, _codes(random, shape, _GROUPED.get(case.weights, case.weights)), sizes, scales)


def of_one_sign(given: Operands) -> Operands:
    """Return operands whose e4m3 numbers have one sign, so that errors of a sum add up. Quantising rows of x changes no number."""
    num_rows = given.group_sizes.sum()
    weight, x = np.abs(given.weight), given.x.copy()
    x[:num_rows] = weight.reshape(-1, x.shape[1])[:num_rows]
    x[:num_rows, 0] = 448
    return given._replace(x=x, weight=weight)


def expected(case: Case, given: Operands) -> tuple[np.ndarray, np.ndarray]:
    """The answer for the rows that are no padding, and the sums of its products' sizes: (R, O)."""
    experts = np.repeat(np.arange(len(given.weight)), given.group_sizes)
    weight = _numbers(case, given.weight)
    if given.scales is not None:
        is_mxfp4 = given.scales.dtype == np.uint8
        scales = np.ldexp(1.0, given.scales.astype(np.int32) - 127) if is_mxfp4 else given.scales.astype(np.float64)
        by_input = scales[:, None] if scales.ndim == 2 else scales.repeat(case.group, axis=1)
        weight = weight * by_input.swapaxes(1, 2)
    x = given.x[: len(experts)].astype(np.float64)
    parts = [
        (row @ weight[expert].T, np.abs(row) @ np.abs(weight[expert]).T) for row, expert in zip(x, experts, strict=True)
    ]
    answers, sizes = (np.array(part).reshape(-1, case.num_outputs) for part in zip(*parts, strict=True))
    return answers, sizes


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "R O"]:
    """Multiply the operands of a case. See `ops.OpCases`."""
    return grouped_matmul(*as_arrays(given), backend=backend)


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to TOLERANCES. See `ops.OpCases`."""
    wanted, sizes = expected(case, given)
    difference = np.abs(np.asarray(out, np.float64)[: len(wanted)] - wanted) / sizes
    return float(np.nan_to_num(difference, nan=np.inf).max()) / TOLERANCES[case.dtype]


def _codes(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int4":
        return random.integers(-8, 8, shape).astype(ml_dtypes.int4)
    numbers = random.integers(0, 256, shape).astype(np.uint8).view(_dtype(dtype))
    return np.where(np.isfinite(numbers.astype(np.float32)), numbers, numbers.dtype.type(1))


def _mxfp4(random: np.random.Generator, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Random numbers in MXFP4 and exponents of their blocks, some of them far apart."""
    shape = (len(case.group_sizes), case.num_outputs)
    exponents = random.integers(107, 132, (shape[0], case.num_inputs // case.group, shape[1])).astype(np.uint8)
    if case.weights == "mxfp4_bytes":
        return random.integers(0, 256, (*shape, case.num_inputs // 2)).astype(np.uint8), exponents
    return random.integers(-7, 8, (*shape, case.num_inputs)).astype(ml_dtypes.int4), exponents


def _numbers(case: Case, weight: np.ndarray) -> np.ndarray:
    """Weights without their scales in float64."""
    if case.weights == "mxfp4_bytes":
        weight = np.stack([weight & 15, weight >> 4], axis=-1).reshape(*weight.shape[:-1], -1)
    elif case.weights == "mxfp4":
        places = weight.astype(np.int8)
        weight = np.where(places < 0, 8 - places, places).astype(np.uint8)
    else:
        return weight.astype(np.float64)
    numbers: np.ndarray = weight.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return numbers


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


CASES = (
    Case((3, 0, 1, 4), 192, 128, padding=8),
    Case((0, 0, 17, 0, 0, 130, 0), 64, 128, padding=1),
    Case((1, 1, 0, 1, 1, 1, 0, 1), 192, 128, weights="float32", dtype="float32", padding=2),
    Case((8, 16, 24), 128, 192, weights="float16", dtype="float16"),
    Case((0, 9, 2, 0), 256, 384, weights="int8", padding=5),
    Case((5, 0, 40, 3), 128, 256, weights="float8_e4m3fn", padding=16),
    Case((2, 7, 0, 1), 256, 256, weights="int4", padding=6),
    Case((0, 70), 256, 256, weights="int4", group=128),
    Case((2, 7, 0, 1), 256, 256, weights="e4m3_groups", padding=6),
    Case((2, 7, 0, 1), 128, 192, weights="mxfp4", group=32, padding=6),
    Case((0, 33, 4), 128, 256, weights="mxfp4_bytes", dtype="float32", group=32, padding=3),
)
"""Experts without rows at the begin, between and at the end, with one row, with whole tiles, with rows of many tiles;
all types of weights."""
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ()
"""Tests of their own run the kernels for Hopper and TPUs in the interpreter: tests/kernels/test_grouped_matmul_gpu.py, tests/kernels/tpu."""
