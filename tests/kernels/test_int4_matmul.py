"""Matmuls with 4-bit weights in groups, against numpy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels.matmul import gpu, matmul
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from tests.kernels.gpu_interpreter import gpu_interpreter

NUM_INPUTS, NUM_OUTPUTS = 192, 70


def operands(num_tokens: int, group: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(num_tokens)
    scale_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    scales = random.uniform(-0.1, 0.1, (NUM_INPUTS // group, NUM_OUTPUTS)).astype(scale_dtype)
    weight = random.integers(-8, 8, (NUM_OUTPUTS, NUM_INPUTS)).astype(ml_dtypes.int4)
    return random.standard_normal((num_tokens, NUM_INPUTS)).astype(scale_dtype), weight, scales


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_tokens", "group"), [(1, 64), (16, 32), (17, 32), (3, 192)])
def test_each_group_is_scaled_by_its_own(num_tokens: int, group: int, dtype: str) -> None:
    x, weight, scales = operands(num_tokens, group, dtype)
    wide = weight.astype(np.float64) * scales.T.astype(np.float64).repeat(group, axis=1)
    found = matmul(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scales))
    assert found.dtype == jnp.float32
    sizes = np.abs(x.astype(np.float64)) @ np.abs(wide).T
    rounding = {"float32": 1e-5, "bfloat16": 2**-9, "float16": 2**-12}[dtype]  # of widened weights; sums are float32
    assert (np.abs(np.asarray(found) - x.astype(np.float64) @ wide.T) <= rounding * sizes).all()


@pytest.mark.parametrize(("num_tokens", "group", "rows", "workers"), [(3, 128, 64, 4), (9, 64, 128, 2)])
def test_the_kernel_for_hopper_scales_each_group_without_a_race(
    num_tokens: int, group: int, rows: int, workers: int
) -> None:
    """With few programs, so that each does parts of several blocks, and few stages, so that each is used again."""
    random = np.random.default_rng(0)
    num_outputs, num_inputs = 2 * workers * rows, 3 * 128
    x = random.standard_normal((num_tokens, num_inputs)).astype(ml_dtypes.bfloat16)
    weight = random.integers(-8, 8, (num_outputs, num_inputs)).astype(ml_dtypes.int4)
    scales = random.uniform(-0.1, 0.1, (num_inputs // group, num_outputs)).astype(ml_dtypes.bfloat16)
    wide = weight.astype(np.float64) * scales.T.astype(np.float64).repeat(group, axis=1)
    sizes = SkinnyTuning(rows=rows, tile=group, stages=2, programs=3, workers=workers)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.matmul.gpu import skinny

        arrays = map(jnp.asarray, (x, weight, scales))
        found = jax.block_until_ready(skinny.matmul(*arrays, tuning=sizes, is_emulated=True))
        assert not has_raced()
    errors = np.abs(np.asarray(found) - x.astype(np.float64) @ wide.T)
    assert (errors <= 1e-5 * (np.abs(x.astype(np.float64)) @ np.abs(wide).T)).all()


def choice(
    num_tokens: int, num_outputs: int, num_inputs: int, group: int, dtype: str = "bfloat16"
) -> SkinnyTuning | None:
    kinds = (
        ((num_tokens, num_inputs), dtype),
        ((num_outputs, num_inputs), "int4"),
        ((num_inputs // group, num_outputs), dtype),
    )
    return gpu.grouped_choice(*(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in kinds))


def test_the_kernel_is_taken_for_few_tokens_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    assert choice(1, 4096, 4096, 128) == SkinnyTuning(rows=64, tile=128, stages=8, programs=132, workers=4)
    assert choice(64, 6144, 4096, 128) == SkinnyTuning(rows=64, tile=128, stages=6, programs=132, workers=4)
    assert choice(64, 6144 + 128, 4096, 128) == SkinnyTuning(rows=64, tile=128, stages=8, programs=132)
    assert choice(128, 4096, 14336, 64) == SkinnyTuning(rows=64, tile=64, stages=8, programs=132)
    assert choice(129, 4096, 4096, 128) is None, "too many sums for the registers"
    assert choice(8, 4096, 4096, 32) is None, "too small a group"
    assert choice(8, 4096 + 64, 4096, 128) is None, "outputs for one worker of two"
    assert choice(8, 4096, 4096, 128, "float16") is None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        assert choice(8, 4096, 4096, 128) is None, "XLA cannot split it"
    monkeypatch.setattr(gpu, "FIRST_JAX", (99, 0, 0))
    assert choice(8, 4096, 4096, 128) is None


def test_few_tokens_meet_the_weights_as_they_are_and_many_meet_widened_ones() -> None:
    """`num_tokens <= group / 2`: what is written then is less than the widened weights."""
    for num_tokens, is_by_group in ((32, True), (33, False)):
        arrays = [jnp.asarray(array) for array in operands(num_tokens, 64, "bfloat16")]
        text = jax.jit(matmul).lower(*arrays).as_text()
        matmul_line = next(line for line in text.splitlines() if "dot_general" in line)
        assert (f"tensor<{NUM_INPUTS // 64}x" in matmul_line) == is_by_group, matmul_line
