"""Matmuls with e4m3 weights in groups of inputs, against numpy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels.matmul import gpu, matmul, reference
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from tests.kernels.gpu_interpreter import gpu_interpreter

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def operands(
    num_tokens: int, num_outputs: int, num_inputs: int, group: int, dtype: str = "bfloat16"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(num_tokens)
    x = random.standard_normal((num_tokens, num_inputs)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    weight = random.uniform(-448, 448, (num_outputs, num_inputs)).astype(E4M3)
    return x, weight, random.uniform(1e-4, 1e-2, (num_inputs // group, num_outputs)).astype(np.float32)


def expected(x: np.ndarray, weight: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the matmul in float64, and the sums of its terms' sizes."""
    by_input = scales.T.astype(np.float64).repeat(weight.shape[1] // len(scales), axis=1)
    wide = weight.astype(np.float64) * by_input
    return x.astype(np.float64) @ wide.T, np.abs(x.astype(np.float64)) @ np.abs(wide).T


@pytest.mark.parametrize(("num_tokens", "group"), [(1, 64), (16, 32), (17, 32), (3, 192)])
@pytest.mark.parametrize("way", ["by groups", "by outputs"])
def test_each_group_is_scaled_by_its_own(num_tokens: int, group: int, way: str) -> None:
    """By groups of few tokens nothing is rounded; widened weights are, to bfloat16."""
    given = operands(num_tokens, 70, 192, group)
    compute = reference._by_groups if way == "by groups" else matmul
    found = np.asarray(compute(*map(jnp.asarray, given)))
    wanted, sizes = expected(*given)
    rounding = 1e-5 if way == "by outputs" or 2 * num_tokens <= group else 2**-9
    assert (np.abs(found - wanted) <= rounding * sizes).all()


@pytest.mark.parametrize(("num_tokens", "group", "rows"), [(3, 128, 64), (9, 64, 128)])
def test_the_kernel_for_hopper_scales_each_group_without_a_race(num_tokens: int, group: int, rows: int) -> None:
    """With few programs, so that each does parts of several blocks, and few stages, so that each is used again."""
    given = operands(num_tokens, 4 * rows, 3 * 128, group)
    sizes = SkinnyTuning(rows=rows, tile=group, stages=2, programs=3)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.matmul.gpu import skinny

        arrays = map(jnp.asarray, given)
        found = jax.block_until_ready(skinny.matmul(*arrays, tuning=sizes, is_emulated=True))
        assert not has_raced()
    wanted, size = expected(*given)
    assert (np.abs(np.asarray(found) - wanted) <= 1e-5 * size).all()


def choice(num_tokens: int, num_outputs: int, num_inputs: int, group: int, **types: str) -> SkinnyTuning | None:
    kinds = (
        ((num_tokens, num_inputs), types.get("x", "bfloat16")),
        ((num_outputs, num_inputs), types.get("weight", "float8_e4m3fn")),
        ((num_inputs // group, num_outputs), types.get("scales", "float32")),
    )
    return gpu.grouped_choice(*(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in kinds))


def test_the_kernel_is_taken_for_few_tokens_of_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    assert choice(1, 4096, 4096, 128) == SkinnyTuning(rows=64, tile=128, stages=5, programs=132, workers=4)
    assert choice(64, 6144, 4096, 128) == SkinnyTuning(rows=64, tile=128, stages=3, programs=132, workers=4)
    assert choice(128, 4096, 14336, 64) == SkinnyTuning(rows=64, tile=64, stages=7, programs=132)
    for num_tokens in (1, 8, 16, 32, 64, 128):
        for group in (64, 128):
            sizes = choice(num_tokens, 4096, 4096, group)
            assert sizes is not None
            outputs, padded = 2 * sizes.rows, -(-num_tokens // 8) * 8
            assert sizes.stages * (group * (2 * padded + outputs) + 4 * outputs) <= 200_000, "shared memory"
            assert sizes.stages >= 3
    assert choice(129, 4096, 4096, 128) is None
    assert choice(8, 4096, 4096, 32) is None
    assert choice(8, 4096, 4096, 128, x="float16") is None
    assert choice(8, 4096, 4096, 128, scales="bfloat16") is None
    assert choice(8, 4096, 4096, 128, weight="int8") is None
