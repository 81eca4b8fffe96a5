"""Products with the weights of experts by the kernel for Hopper, interpreted: against float64, and its choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.grouped_matmul import gpu
from jaxserve_kernels.grouped_matmul.cases import CASES, TOLERANCES, Case, expected, operands
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning

from tests.kernels.gpu_interpreter import gpu_interpreter

NUM_PROGRAMS = 3
"""Few, so that each does several units."""
KERNEL_CASES = [
    (CASES[3], 64),
    (Case((3, 0, 1, 4), 256, 128, padding=7), 64),
    (Case((0, 0, 17, 0, 0, 130, 0), 128, 128, padding=1), 64),
    (Case((0, 9, 0, 200), 128, 64), 128),
    (Case((5,), 128, 320), 64),  # inputs in three parts
]


def _multiply(x: np.ndarray, weight: np.ndarray, group_sizes: np.ndarray, rows: int) -> np.ndarray:
    outputs = 128 if weight.shape[1] % 256 == 0 else 64
    sizes = GroupedTuning(rows=rows, outputs=outputs, inputs=64, stages=2, programs=NUM_PROGRAMS)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.grouped_matmul.gpu import kernel

        arrays = map(jnp.asarray, (x, weight, group_sizes))
        out = jax.block_until_ready(kernel.grouped_matmul(*arrays, tuning=sizes))
        assert not has_raced()
    return np.asarray(out)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "rows"), KERNEL_CASES, ids=str)
def test_the_kernel_for_hopper_equals_the_product_in_float64_without_a_race(case: Case, rows: int) -> None:
    x, weight, group_sizes, _ = operands(case)
    wanted, sizes = expected(case, operands(case))
    found = _multiply(x, weight, group_sizes, rows).astype(np.float64)[: len(wanted)]
    assert (np.abs(found - wanted) <= TOLERANCES[case.dtype] * sizes).all()


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """The same rows of one expert among others, in another place of another tile."""
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((64, 64)), random.standard_normal((3, 128, 64))
    x, weight = (np.asarray(jnp.asarray(each, jnp.bfloat16)) for each in (x, weight))
    found = []
    for sizes in ((0, 5, 59), (11, 53, 0)):
        first = sizes[0] + min(sizes[1] - 5, 3)
        rows = np.concatenate((x[5 : 5 + first], x[:5], x[5 + first :]))
        found.append(_multiply(rows, weight, np.array(sizes, np.int32), 64)[first : first + 5])
    np.testing.assert_array_equal(*found)


def _choice(num_rows: int, weight: tuple[int, int, int], dtype: str = "bfloat16") -> GroupedTuning | None:
    x = jax.ShapeDtypeStruct((num_rows, weight[2]), jnp.dtype("bfloat16"))
    return gpu.choice(x, jax.ShapeDtypeStruct(weight, jnp.dtype(dtype)))


def test_the_kernel_is_taken_for_shapes_that_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_FIRST_JAX", (0, 0, 0))
    few, many = _choice(256, (128, 1536, 2048)), _choice(4096, (8, 28672, 4096))
    assert few is not None
    assert many is not None
    assert (few.rows, many.rows) == (64, 128)
    narrow = _choice(256, (128, 384, 2048))
    assert narrow is not None
    assert narrow.outputs == 64
    assert _choice(256, (128, 1536, 2048), "float32") is None
    assert _choice(256, (128, 1536 - 64, 2048)) is None
    assert _choice(256, (128, 1536, 2048 - 32)) is None
    monkeypatch.setattr(gpu, "_FIRST_JAX", (99,))
    assert _choice(256, (128, 1536, 2048)) is None
