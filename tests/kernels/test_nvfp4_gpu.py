"""Matmuls with dense weights in NVFP4, against numpy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels import nvfp4
from jaxserve_kernels.grouped_matmul import gpu as experts
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning
from jaxserve_kernels.matmul import gpu
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from tests.kernels.gpu_interpreter import gpu_interpreter

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
NUMBERS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def operands(
    num_tokens: int, num_outputs: int, num_inputs: int, size: int, dtype: str = "bfloat16"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, bytes of two numbers, and scales of blocks of `size` inputs: all that e4m3 has, but NaN."""
    random = np.random.default_rng(num_tokens)
    x = random.standard_normal((num_tokens, num_inputs)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    values = random.integers(0, 256, (num_outputs, num_inputs // 2)).astype(np.uint8)
    codes = random.integers(0, 256, (num_inputs // size, num_outputs)).astype(np.uint8)
    return x, values, np.where(codes & 127 == 127, 1, codes).astype(np.uint8).view(E4M3)


def expected(x: np.ndarray, values: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the matmul in float64, and the sums of its terms' sizes."""
    numbers = NUMBERS[np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)]
    wide = numbers * blocks.T.astype(np.float64).repeat(numbers.shape[1] // len(blocks), axis=1)
    return x.astype(np.float64) @ wide.T, np.abs(x.astype(np.float64)) @ np.abs(wide).T


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (5, 16), (5, 8)])
def test_xla_for_accelerators_multiplies_with_exact_weights(num_tokens: int, size: int, dtype: str) -> None:
    """Numbers times block scales are not rounded in any dtype; the scales of the matrix scale the result."""
    x, values, blocks = operands(num_tokens, 70, 96, size, dtype)
    matrix = np.random.default_rng(0).uniform(0.5, 900, (2, 70)).astype(np.float32)
    scales = nvfp4.TwoLevelScales(jnp.asarray(blocks), jnp.asarray(matrix))
    found = np.asarray(nvfp4._whole(jnp.asarray(x), jnp.asarray(values), scales))
    of_matrix = matrix[0].astype(np.float64) / matrix[1]
    wanted, sizes = (each * of_matrix for each in expected(x, values, blocks))
    assert (np.abs(found - wanted) <= 1e-6 * sizes).all()


@pytest.mark.parametrize(("num_tokens", "size", "workers"), [(3, 16, 4), (9, 8, 2)])
def test_the_kernel_for_hopper_scales_each_block_without_a_race(num_tokens: int, size: int, workers: int) -> None:
    """With few programs, so that each does parts of several blocks of outputs, and few stages, so that each is used again."""
    given = operands(num_tokens, 2 * workers * 64, 3 * 128, size)
    sizes = SkinnyTuning(rows=64, tile=128, stages=2, programs=3, workers=workers)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.matmul.gpu import skinny

        found = jax.block_until_ready(skinny.matmul(*map(jnp.asarray, given), tuning=sizes, is_emulated=True))
        assert not has_raced()
    wanted, magnitudes = expected(*given)
    assert (np.abs(np.asarray(found) - wanted) <= 1e-5 * magnitudes).all()


def expert_operands(
    sizes: tuple[int, ...], num_outputs: int, num_inputs: int, size: int
) -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Return x, bytes, rows and block scales of experts; the results in float64, and the sums of their terms' sizes."""
    matrices = [operands(seed + 1, num_outputs, num_inputs, size)[1:] for seed in range(len(sizes))]
    x = operands(sum(sizes), 1, num_inputs, size)[0]
    values, blocks = (np.stack(each) for each in zip(*matrices, strict=True))
    results = [
        expected(x[row : row + 1], *matrices[expert])
        for row, expert in enumerate(np.repeat(np.arange(len(sizes)), sizes))
    ]
    wanted, magnitudes = (np.concatenate(each) for each in zip(*results, strict=True))
    return (x, values, np.array(sizes, np.int32), blocks), wanted, magnitudes


EXPERTS = [
    (((3, 0, 9), 256, 384, 16), GroupedTuning(16, 128, 128, stages=2, programs=3)),
    (((0, 70), 128, 256, 8), GroupedTuning(64, 64, 128, stages=2, programs=3)),
]
"""Rows of each expert, outputs, inputs, and inputs of a block."""


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "sizes"), EXPERTS, ids=str)
def test_the_kernel_for_experts_scales_each_block_without_a_race(
    shape: tuple[tuple[int, ...], int, int, int], sizes: GroupedTuning
) -> None:
    given, wanted, magnitudes = expert_operands(*shape)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.grouped_matmul.gpu import small

        made = small.grouped_matmul(*map(jnp.asarray, given), tuning=sizes, is_emulated=True)
        found = np.asarray(jax.block_until_ready(made))
        assert not has_raced()
    assert (np.abs(found - wanted) <= 1e-5 * magnitudes).all()


def test_the_kernel_for_experts_is_taken_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_FIRST_JAX", (0, 0, 0))

    def choice(num_rows: int, num_outputs: int, num_inputs: int, size: int = 16) -> GroupedTuning | None:
        x = jax.ShapeDtypeStruct((num_rows, num_inputs), jnp.bfloat16)
        values = jax.ShapeDtypeStruct((128, num_outputs, num_inputs // 2), jnp.uint8)
        blocks = jax.ShapeDtypeStruct((128, num_inputs // size, num_outputs), jnp.float8_e4m3fn)
        return experts.small_choice(x, values, blocks)

    few, many = choice(256, 1536, 2048), choice(16_384, 2048, 768, 8)
    assert few is not None and many is not None
    assert (few.rows, few.inputs) == (16, 128)
    assert many.rows == 128
    for sizes, size in ((few, 16), (many, 8)):
        stage = sizes.inputs * (2 * sizes.rows + sizes.outputs + 2 * sizes.outputs // size)
        assert sizes.stages >= 3 and sizes.stages * stage <= 200_000
    assert choice(256, 1536, 2048 + 64) is None, "half a step"
    assert choice(256, 1536 + 64, 2048) is None, "outputs for one worker of two"
    assert choice(256, 1536, 2048, 32) is None, "blocks of another format"


def choice(
    num_tokens: int, num_outputs: int, num_inputs: int, size: int = 16, dtype: str = "bfloat16"
) -> SkinnyTuning | None:
    kinds = (
        ((num_tokens, num_inputs), dtype),
        ((num_outputs, num_inputs // 2), "uint8"),
        ((num_inputs // size, num_outputs), "float8_e4m3fn"),
    )
    return gpu.grouped_choice(*(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in kinds))


def test_the_kernel_is_taken_for_as_many_tokens_as_with_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    assert choice(1, 4096, 4096) == SkinnyTuning(rows=64, tile=128, stages=8, programs=132, workers=4)
    assert choice(64, 6144, 4096) == SkinnyTuning(rows=64, tile=128, stages=5, programs=132, workers=4)
    assert choice(64, 6144 + 128, 4096, 8) == SkinnyTuning(rows=64, tile=128, stages=7, programs=132)
    assert choice(128, 4096, 14336) == SkinnyTuning(rows=64, tile=128, stages=4, programs=132)
    assert choice(129, 4096, 4096) is None
    assert choice(8, 4096, 4096, 32) is None, "blocks of another format"
    assert choice(8, 4096, 4096 + 64) is None, "half a step"
    assert choice(8, 4096 + 64, 4096) is None, "outputs for one worker of two"
    assert choice(8, 4096, 4096, dtype="float16") is None
    monkeypatch.setattr(gpu, "FIRST_JAX", (99, 0, 0))
    assert choice(8, 4096, 4096) is None


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (64, 16), (128, 16), (64, 8)])
def test_the_steps_in_flight_fit_shared_memory(monkeypatch: pytest.MonkeyPatch, num_tokens: int, size: int) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    sizes = choice(num_tokens, 4096, 4096, size)
    assert sizes is not None and sizes.stages >= 3
    activations, weights, scales = 2 * -(-num_tokens // 8) * 8, sizes.block / 2, sizes.block / size
    assert sizes.stages * sizes.tile * (activations + weights + scales) <= 200_000
