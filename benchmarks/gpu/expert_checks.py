"""Checks of the matmuls with the weights of experts."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.grouped_matmul import grouped_matmul
from jaxserve_kernels.grouped_matmul.cases import Case, expected, of_one_sign, operands

from benchmarks.gpu import oracle
from benchmarks.gpu.crew import Bench
from benchmarks.gpu.op_checks import MATMUL_TOLERANCES, compare

_FEW = (0, 1, 2, 0, 0, 3, 1, 9, 0, 1, 17, 0, 4, 1, 0, 0)
_MANY = (0, 70, 300, 1, 0, 131, 5, 64)
_ROUNDED = {"int8": 3e-3, "float8_e4m3fn": 4e-2}
"""A value on the border of two steps may be rounded to either, in e4m3 up to an eighth apart: of 768 activations in
bfloat16, which have few bits themselves, up to some thirty are."""
_SUMS = 5e-3
"""Tolerance for sums over many inputs. Tensor cores that add all products of e4m3 with 14 bits are off by 2 % or more, in a
model of them; those that add 128 at a time by up to 0.2 %."""
_WIDENED = 1e-2
"""Tolerance for weights in groups, which the reference may scale and round before it multiplies."""
CASES = tuple(
    Case(sizes, 512, 768, weights, dtype, padding=3, group=group)
    for sizes in (_FEW, _MANY)
    for weights, dtype, group in (
        ("bfloat16", "bfloat16", 0),
        ("float16", "float16", 0),
        ("int8", "bfloat16", 0),
        ("int8", "float16", 0),
        ("float8_e4m3fn", "bfloat16", 0),
        ("int4", "bfloat16", 128),
        ("int4", "bfloat16", 64),
        ("e4m3_groups", "bfloat16", 128),
    )
)
"""Decode steps and prompts, in every type that a kernel takes."""
_LONG = Case((3, 0, 9, 17), 512, 4096, "float8_e4m3fn", padding=3)
"""Sums as long as those of large models."""


def check_experts(case: Case, backend: Backend, bench: Bench, *, dynamic: bool = False) -> None:
    """By the kernel where `backend` has one. dynamic: activations of 8-bit weights are rounded to their type."""
    given = operands(case, bench.seed)
    if dynamic:
        rounded = oracle.quantise(np.nan_to_num(given.x.astype(np.float64)), given.weight.dtype)
        wanted, _ = expected(case, given._replace(x=rounded))
        tolerance = _ROUNDED[case.weights]
    else:
        wanted, _ = expected(case, given)
        tolerance = (
            _WIDENED
            if case.weights in ("int4", "e4m3_groups") and backend == "reference"
            else MATMUL_TOLERANCES[case.dtype]
        )
    arguments = [jnp.asarray(each) for each in given if each is not None]
    compiled = bench.compile(partial(grouped_matmul, dynamic=dynamic, backend=backend), *arguments)
    found = np.asarray(compiled(*arguments), np.float64)[: len(wanted)]
    compare(bench, f"{backend}: experts, {case}{', rounded activations' if dynamic else ''}", found, wanted, tolerance)


def check_sums(backend: Backend, bench: Bench) -> None:
    """Check long sums of e4m3 by e4m3. Rounding changes no number: only how products are added makes a difference."""
    given = of_one_sign(operands(_LONG, bench.seed))
    wanted, _ = expected(_LONG, given)
    arguments = [jnp.asarray(each) for each in given if each is not None]
    compiled = bench.compile(partial(grouped_matmul, dynamic=True, backend=backend), *arguments)
    found = np.asarray(compiled(*arguments), np.float64)[: len(wanted)]
    compare(bench, f"{backend}: experts, {_LONG}, sums of rounded activations", found, wanted, _SUMS)
