"""Matmuls with the weights of experts by the kernel for Hopper, interpreted: against float64, and its choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.grouped_matmul import gpu
from jaxserve_kernels.grouped_matmul.cases import CASES, Case, error, operands
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning
from jaxserve_kernels.matmul import quantize_rows

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


SMALL_CASES = [
    (Case((0, 9, 2, 0), 256, 384, weights="int8", padding=5), 16),
    (Case((3, 0, 40), 128, 192, weights="int8", dtype="float16"), 64),
    (Case((5, 0, 40, 3), 128, 256, weights="float8_e4m3fn", padding=16), 16),
    (Case((2, 0, 1), 256, 256, weights="int4", padding=6), 16),
    (Case((0, 140), 128, 256, weights="int4", group=128), 128),
    (Case((2, 0, 1), 256, 256, weights="e4m3_groups", group=128, padding=6), 16),
    (Case((0, 140), 128, 256, weights="e4m3_groups"), 128),
    (Case((2, 0, 17), 128, 192, weights="mxfp4", group=32, padding=6), 16),
    (Case((0, 3, 70), 192, 128, weights="mxfp4", group=32), 64),  # the last block of outputs overlaps
]
"""Three programs, so that inputs are in parts where one expert has rows."""


def _multiply(x: np.ndarray, weight: np.ndarray, group_sizes: np.ndarray, rows: int) -> np.ndarray:
    outputs = 128 if weight.shape[1] % 256 == 0 else 64
    sizes = GroupedTuning(rows=rows, outputs=outputs, inputs=64, stages=2, programs=NUM_PROGRAMS)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.grouped_matmul.gpu import whole

        arrays = map(jnp.asarray, (x, weight, group_sizes))
        out = jax.block_until_ready(whole.grouped_matmul(*arrays, tuning=sizes))
        assert not has_raced()
    return np.asarray(out)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "rows"), KERNEL_CASES, ids=str)
def test_the_kernel_for_hopper_equals_the_matmul_in_float64_without_a_race(case: Case, rows: int) -> None:
    given = operands(case)
    assert error(case, given, _multiply(*given[:3], rows)) <= 1


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Compare the rows of one expert among other experts, in another place of another tile.

    The interpreter multiplies a tile by the CPU's own matmul, whose order of sums depends on a row's place in
    it. All partial sums of these small integers are exact in float32: the rows must be equal in any order.
    """
    random = np.random.default_rng(0)
    x, weight = random.integers(-8, 9, (64, 64)), random.integers(-8, 9, (3, 128, 64))
    x, weight = (np.asarray(jnp.asarray(each, jnp.bfloat16)) for each in (x, weight))
    found = []
    for sizes in ((0, 5, 59), (11, 53, 0)):
        first = sizes[0] + min(sizes[1] - 5, 3)
        rows = np.concatenate((x[5 : 5 + first], x[:5], x[5 + first :]))
        found.append(_multiply(rows, weight, np.array(sizes, np.int32), 64)[first : first + 5])
    np.testing.assert_array_equal(*found)


def _multiply_small(case: Case, rows: int, *, dynamic: bool = False) -> np.ndarray:
    step = case.group if case.weights in ("int4", "e4m3_groups") else 64
    outputs = 128 if case.num_outputs % 256 == 0 else 64
    sizes = GroupedTuning(rows=rows, outputs=outputs, inputs=step, stages=2, programs=NUM_PROGRAMS)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.grouped_matmul.gpu import small

        arrays = [jnp.asarray(each) for each in operands(case)]
        out = jax.block_until_ready(small.grouped_matmul(*arrays, dynamic=dynamic, tuning=sizes, is_emulated=True))
        assert not has_raced()
    return np.asarray(out, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "rows"), SMALL_CASES, ids=str)
def test_the_kernel_for_small_weights_equals_the_matmul_in_float64_without_a_race(case: Case, rows: int) -> None:
    assert error(case, operands(case), _multiply_small(case, rows)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn"])
def test_rounded_activations_meet_small_weights_as_they_are(weights: str) -> None:
    case = Case((0, 9, 2, 0), 128, 128, weights=weights)
    x, weight, group_sizes, scales = operands(case)
    assert scales is not None
    found = _multiply_small(case, 16, dynamic=True)
    rounded, row_scales = (np.asarray(each, np.float64) for each in quantize_rows(jnp.asarray(x), weight.dtype))
    experts = np.repeat(np.arange(len(weight)), group_sizes)
    wide = weight.astype(np.float64)[experts] * scales.astype(np.float64)[experts][:, :, None]
    wanted = np.einsum("ri,roi->ro", rounded * row_scales[:, None], wide)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


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
    assert _small_choice("int8", 256) is None


def _small_choice(
    weights: str,
    num_rows: int,
    group: int = 0,
    dtype: str = "bfloat16",
    num_inputs: int = 2048,
    *,
    dynamic: bool = False,
) -> GroupedTuning | None:
    of_groups = dtype if weights == "int4" else "float32"
    scales = ((128, num_inputs // group, 1536), of_groups) if group else ((128, 1536), "float32")
    arrays = ((num_rows, num_inputs), dtype), ((128, 1536, num_inputs), weights), scales
    shapes = (jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in arrays)
    return gpu.small_choice(*shapes, dynamic=dynamic)


def test_sizes_follow_the_bits_of_the_weights_and_the_rows_of_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_FIRST_JAX", (0, 0, 0))
    for weights, group in (("int8", 0), ("float8_e4m3fn", 0), ("int4", 128), ("float8_e4m3fn", 128)):
        found = [_small_choice(weights, num_rows, group) for num_rows in (8, 1024, 128 * 64)]
        assert [sizes.rows for sizes in found if sizes is not None] == [16, 64, 128]
    fine = _small_choice("int4", 8, 64)
    assert fine is not None
    assert fine.inputs == 64, "a step is a group"
    assert _small_choice("int4", 8, 32) is None
    assert _small_choice("int4", 8, 128, "float16") is None
    assert _small_choice("float8_e4m3fn", 8, 32) is None
    assert _small_choice("float8_e4m3fn", 8, 128, "float16") is None
    assert _small_choice("int8", 8, 128) is None
    assert _small_choice("int8", 8, dtype="float32") is None
    assert _small_choice("int8", 8, num_inputs=2048 + 32) is None


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("num_rows", [8, 1024, 128 * 64])
def test_stages_of_fp8_in_blocks_fit_shared_memory(num_rows: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_FIRST_JAX", (0, 0, 0))
    sizes = _small_choice("float8_e4m3fn", num_rows, group)
    assert sizes is not None
    assert (sizes.inputs, sizes.stages >= 3) == (group, True)
    outputs = 2 * sizes.outputs
    assert sizes.stages * (group * (2 * sizes.rows + outputs) + 4 * outputs) <= 200_000


@pytest.mark.parametrize(("num_inputs", "step"), [(2048, 128), (2048 + 64, 64)])
@pytest.mark.parametrize("num_rows", [8, 1024, 128 * 64])
def test_two_sums_of_e4m3_by_e4m3_fit_registers_and_the_stages_shared_memory(
    num_rows: int, num_inputs: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_FIRST_JAX", (0, 0, 0))
    sizes = _small_choice("float8_e4m3fn", num_rows, num_inputs=num_inputs, dynamic=True)
    assert sizes is not None
    assert (sizes.inputs, sizes.stages >= 3) == (step, True)
    assert sizes.stages * step * (sizes.rows + 2 * sizes.outputs) <= 200_000
    assert 2 * sizes.rows * sizes.outputs // 128 <= 128, "registers of a thread"


def test_blocks_of_outputs_in_mxfp4_may_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_FIRST_JAX", (0, 0, 0))

    def chosen(num_outputs: int, num_inputs: int, block: int = 32, dtype: str = "bfloat16") -> GroupedTuning | None:
        shapes = ((128, num_inputs), dtype), ((32, num_outputs, num_inputs), "int4")
        exponents = ((32, num_inputs // block, num_outputs), "uint8")
        return gpu.small_choice(*(jax.ShapeDtypeStruct(each, jnp.dtype(name)) for each, name in (*shapes, exponents)))

    for num_outputs, outputs in ((5760, 64), (2880, 64), (2048, 128)):
        sizes = chosen(num_outputs, 2880)
        assert sizes is not None
        assert (sizes.outputs, sizes.inputs) == (outputs, 64)
    assert chosen(2880 + 32, 2880) is None
    assert chosen(64, 2880) is None
    assert chosen(2880, 1440) is None, "half of the inputs of gpt-oss"
    assert chosen(2880, 2880, block=16) is None
    assert chosen(2880, 2880, dtype="float16") is None
