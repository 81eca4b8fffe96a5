"""Matmuls with small weights and with those of experts, by the PTX that the compiler makes of their kernels.

Against float64, in several orders of events.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.block_kinds import BLOCK_KINDS
from jaxserve_kernels.block_matmul.cases import Case as BlockCase
from jaxserve_kernels.block_matmul.cases import error as block_error
from jaxserve_kernels.grouped_matmul import cases as experts
from jaxserve_kernels.grouped_matmul.cases import Case as ExpertsCase
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning
from jaxserve_kernels.matmul import cases as skinny_cases
from jaxserve_kernels.matmul import quantize_rows
from jaxserve_kernels.matmul.cases import Case
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from tests.kernels import test_block_matmul_gpu as blocks
from tests.kernels import test_nvfp4_gpu as nvfp4
from tests.ptx.launch import emulated

pytestmark = [pytest.mark.aot, pytest.mark.slow]

E4M3 = "float8_e4m3fn"
SKINNY = [
    (Case(3, 256, 384, padding=5), SkinnyTuning(rows=64, tile=128, stages=3, programs=3)),
    (Case(7, 512, 256, weights=E4M3), SkinnyTuning(rows=128, tile=128, stages=2, programs=3)),
    (Case(7, 128, 512, weights=E4M3, dtype="float16"), SkinnyTuning(rows=64, tile=64, stages=3, programs=3)),
    (Case(33, 256, 384, dtype="int8"), SkinnyTuning(rows=64, tile=128, stages=2, programs=2)),
    (
        Case(20, 256, 512, weights=E4M3, dtype=E4M3),
        SkinnyTuning(rows=64, tile=128, stages=2, programs=3),
    ),
]
SKINNY_GROUPED = [
    (ExpertsCase((5,), 256, 512, weights="int4", group=128), SkinnyTuning(rows=64, tile=128, stages=3, programs=3)),
    (ExpertsCase((17,), 512, 192, weights="int4", group=64), SkinnyTuning(rows=128, tile=64, stages=3, programs=3)),
    (ExpertsCase((9,), 512, 384, weights="int4", group=128), SkinnyTuning(64, 128, stages=3, programs=3, workers=4)),
    (
        ExpertsCase((5,), 256, 384, weights="e4m3_groups", group=128),
        SkinnyTuning(64, 128, stages=2, programs=2, workers=4),
    ),
    (ExpertsCase((3,), 128, 256, weights="e4m3_groups", group=64), SkinnyTuning(64, 64, stages=3, programs=3)),
]
NVFP4 = [
    ((5, 512, 384, 16), SkinnyTuning(64, 128, stages=3, programs=3, workers=4)),
    ((9, 256, 384, 8), SkinnyTuning(64, 128, stages=2, programs=3)),
]
"""Tokens, outputs, inputs, and inputs of a block."""
BLOCKS = [
    (("Q4_0", 5, 512, 256), SkinnyTuning(64, 128, stages=2, programs=3, workers=4)),
    (("Q8_0", 9, 256, 384), SkinnyTuning(64, 128, stages=2, programs=3)),
    (("Q4_K", 17, 256, 512), SkinnyTuning(64, 256, stages=2, programs=2, workers=4)),
    (("Q6_K", 3, 256, 512), SkinnyTuning(64, 256, stages=2, programs=3)),
    (("Q4_1", 3, 256, 256), SkinnyTuning(64, 128, stages=2, programs=2, workers=4)),
    (("Q5_0", 9, 256, 256), SkinnyTuning(64, 128, stages=2, programs=3)),
    (("Q5_1", 3, 256, 256), SkinnyTuning(64, 128, stages=2, programs=2, workers=4)),
    (("Q5_K", 5, 256, 512), SkinnyTuning(64, 256, stages=2, programs=2, workers=4)),
]
"""Type of the blocks, tokens, outputs and inputs."""
BLOCKS_OF_EXPERTS = [
    (BlockCase(kind, 12, 2, 256, 512 // BLOCK_KINDS[kind].num_inputs, group_sizes=(3, 0, 9)), rows)
    for kind, rows in (("Q4_0", 16), ("Q5_1", 16), ("Q8_0", 16), ("Q4_K", 16), ("Q5_K", 64), ("Q6_K", 16))
]
"""Cases, and the rows of a tile."""
WHOLE = [
    (ExpertsCase((3, 0, 9, 20, 5), 128, 128, padding=3), GroupedTuning(64, 64, 64, stages=2, programs=3)),
    (ExpertsCase((1, 70, 0, 50), 256, 256), GroupedTuning(64, 128, 64, stages=4, programs=3)),
    (
        ExpertsCase((128, 8, 0, 7), 256, 128, weights="float16", dtype="float16"),
        GroupedTuning(128, 128, 64, stages=4, programs=5),
    ),
    (ExpertsCase((1, 0, 1, 0, 1), 256, 512), GroupedTuning(64, 128, 64, stages=4, programs=12)),  # inputs in parts
]
SMALL = [
    (ExpertsCase((0, 9, 2, 0), 256, 384, weights="int8", padding=5), GroupedTuning(16, 128, 128, stages=3, programs=3)),
    (ExpertsCase((2, 70), 128, 128, weights="int8", dtype="float16"), GroupedTuning(64, 64, 64, stages=2, programs=3)),
    (ExpertsCase((5, 0, 40), 128, 256, weights=E4M3), GroupedTuning(64, 64, 128, stages=2, programs=3)),
    (ExpertsCase((2, 0, 1), 256, 256, weights="int4", padding=6), GroupedTuning(16, 128, 64, stages=2, programs=3)),
    (ExpertsCase((0, 140), 128, 256, weights="int4", group=128), GroupedTuning(128, 64, 128, stages=2, programs=3)),
]
DYNAMIC = [
    (ExpertsCase((0, 9, 2), 128, 256, weights="int8"), GroupedTuning(16, 64, 128, stages=2, programs=3)),
    (ExpertsCase((9, 20, 0), 128, 256, weights=E4M3), GroupedTuning(16, 64, 128, stages=2, programs=3)),
]
_STEP_OF_E4M3, _ALL_CODES_OF_E4M3 = 2e-3, 4e-3
"""Tolerances for sums of e4m3 by e4m3, of which the tensor cores add the 128 of a step; if all numbers of e4m3 are as frequent."""


@pytest.mark.parametrize(
    ("case", "sizes"),
    [*SKINNY[::2], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SKINNY[1::2])],
    ids=str,
)
def test_a_matmul_of_few_tokens_equals_the_one_in_float64(case: Case, sizes: SkinnyTuning) -> None:
    given = skinny_cases.operands(case)
    wanted, magnitudes = skinny_cases.expected(case, given)
    with emulated():
        from jaxserve_kernels.matmul.gpu import skinny

        x, weight, scales = map(jnp.asarray, given)
        found = np.asarray(skinny.matmul(x, weight, tuning=sizes) * scales, np.float64)
    _check(found, wanted, magnitudes, _ALL_CODES_OF_E4M3 if case.dtype == E4M3 else skinny_cases.TOLERANCES[case.dtype])


@pytest.mark.parametrize(
    ("case", "sizes"),
    [*SKINNY_GROUPED[::2], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SKINNY_GROUPED[1::2])],
    ids=str,
)
def test_a_matmul_with_weights_in_groups_equals_the_one_in_float64(case: ExpertsCase, sizes: SkinnyTuning) -> None:
    """Compare with the only expert."""
    given = experts.operands(case)
    wanted, magnitudes = experts.expected(case, given)
    assert given.scales is not None
    with emulated():
        from jaxserve_kernels.matmul.gpu import skinny

        x, weight, scales = map(jnp.asarray, (given.x, given.weight[0], given.scales[0]))
        found = np.asarray(skinny.matmul(x, weight, scales, tuning=sizes), np.float64)
    _check(found, wanted, magnitudes, experts.TOLERANCES[case.dtype])


@pytest.mark.parametrize(("shape", "sizes"), NVFP4, ids=str)
def test_a_matmul_with_weights_in_nvfp4_equals_the_one_in_float64(
    shape: tuple[int, int, int, int], sizes: SkinnyTuning
) -> None:
    given = nvfp4.operands(*shape)
    wanted, magnitudes = nvfp4.expected(*given)
    with emulated():
        from jaxserve_kernels.matmul.gpu import skinny

        found = np.asarray(skinny.matmul(*map(jnp.asarray, given), tuning=sizes), np.float64)
    _check(found, wanted, magnitudes, 1e-6)


@pytest.mark.parametrize(("shape", "sizes"), nvfp4.EXPERTS, ids=str)
def test_a_matmul_with_experts_in_nvfp4_equals_the_one_in_float64(
    shape: tuple[tuple[int, ...], int, int, int], sizes: GroupedTuning
) -> None:
    given, wanted, magnitudes = nvfp4.expert_operands(*shape)
    with emulated():
        from jaxserve_kernels.grouped_matmul.gpu import small

        found = np.asarray(small.grouped_matmul(*map(jnp.asarray, given), tuning=sizes), np.float64)
    _check(found, wanted, magnitudes, 1e-6)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [*BLOCKS[::2], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in BLOCKS[1::2])],
    ids=str,
)
def test_a_matmul_with_gguf_blocks_equals_the_one_in_float64(
    shape: tuple[str, int, int, int], sizes: SkinnyTuning
) -> None:
    x, tiles = blocks.operands(*shape)
    with emulated():
        from jaxserve_kernels.block_matmul.gpu import skinny

        found = skinny.block_matmul(jnp.asarray(x), jnp.asarray(tiles), kind=BLOCK_KINDS[shape[0]], tuning=sizes)
    assert blocks.error(shape[0], x, tiles, found) <= 1e-6


@pytest.mark.parametrize(
    ("case", "rows"),
    [*BLOCKS_OF_EXPERTS[::2], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in BLOCKS_OF_EXPERTS[1::2])],
    ids=str,
)
def test_a_matmul_with_gguf_blocks_of_experts_equals_the_one_in_float64(case: BlockCase, rows: int) -> None:
    given, kind = blocks.expert_operands(case), BLOCK_KINDS[case.kind]
    sizes = GroupedTuning(rows, 64, blocks.STEPS[case.kind], stages=2, programs=3)
    with emulated():
        from jaxserve_kernels.block_matmul.gpu import grouped

        arrays = map(jnp.asarray, (*given, np.array(case.group_sizes)))
        found = grouped.grouped_block_matmul(*arrays, kind=kind, tuning=sizes)
    assert block_error(case, given, found) <= 1


@pytest.mark.parametrize(
    ("case", "sizes"),
    [*WHOLE[::2], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in WHOLE[1::2])],
    ids=str,
)
def test_a_matmul_with_experts_equals_the_one_in_float64(case: ExpertsCase, sizes: GroupedTuning) -> None:
    given = experts.operands(case)
    wanted, magnitudes = experts.expected(case, given)
    with emulated() as launches:
        from jaxserve_kernels.grouped_matmul.gpu import whole

        x, weight, group_sizes, _ = given
        found = whole.grouped_matmul(*map(jnp.asarray, (x, weight, group_sizes)), tuning=sizes)
    _check(np.asarray(found, np.float64), wanted, magnitudes, experts.TOLERANCES[case.dtype])
    (parts,) = launches[-1].results
    assert not parts.is_written[:, len(wanted) :].any(), "rows of padding are nobody's"


@pytest.mark.parametrize(
    ("case", "sizes"),
    [*SMALL[::2], *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in SMALL[1::2])],
    ids=str,
)
def test_a_matmul_with_small_experts_equals_the_one_in_float64(case: ExpertsCase, sizes: GroupedTuning) -> None:
    given = experts.operands(case)
    wanted, magnitudes = experts.expected(case, given)
    found = _multiply_small(given, sizes, dynamic=False)
    _check(found, wanted, magnitudes, experts.TOLERANCES[case.dtype])


@pytest.mark.parametrize(("case", "sizes"), DYNAMIC, ids=str)
def test_a_matmul_of_quantized_rows_with_experts_equals_the_one_in_float64(
    case: ExpertsCase, sizes: GroupedTuning
) -> None:
    given = experts.operands(case)
    codes, row_scales = quantize_rows(jnp.asarray(given.x), given.weight.dtype)
    rounded = given._replace(x=np.asarray(codes, np.float64) * np.asarray(row_scales)[:, None])
    wanted, magnitudes = experts.expected(case, rounded)
    tolerance = _STEP_OF_E4M3 if case.weights == E4M3 else experts.TOLERANCES[case.dtype]
    _check(_multiply_small(given, sizes, dynamic=True), wanted, magnitudes, tolerance)


def test_many_inputs_of_e4m3_experts_are_not_added_by_the_tensor_cores_alone() -> None:
    """Add numbers of one sign: of each that is far smaller than the sum before it, tensor cores lose most bits."""
    case = ExpertsCase((3, 2), 128, 2048, weights=E4M3)
    given = experts.of_one_sign(experts.operands(case))
    wanted, magnitudes = experts.expected(case, given)
    found = _multiply_small(given, GroupedTuning(16, 64, 128, stages=2, programs=2), dynamic=True)
    _check(found, wanted, magnitudes, _STEP_OF_E4M3)


def test_many_inputs_of_e4m3_are_not_added_by_the_tensor_cores_alone() -> None:
    case, sizes = Case(3, 128, 2048, weights=E4M3, dtype=E4M3), SkinnyTuning(64, 128, stages=2, programs=2)
    given = skinny_cases.operands(case)
    given = given._replace(x=np.abs(given.x), weight=np.abs(given.weight))
    wanted, magnitudes = skinny_cases.expected(case, given)
    with emulated():
        from jaxserve_kernels.matmul.gpu import skinny

        x, weight, scales = map(jnp.asarray, given)
        found = np.asarray(skinny.matmul(x, weight, tuning=sizes) * scales, np.float64)
    _check(found, wanted, magnitudes, _STEP_OF_E4M3)


def _multiply_small(given: experts.Operands, sizes: GroupedTuning, *, dynamic: bool) -> np.ndarray:
    with emulated():
        from jaxserve_kernels.grouped_matmul.gpu import small

        found = small.grouped_matmul(*map(jnp.asarray, given), dynamic=dynamic, tuning=sizes)
    return np.asarray(found, np.float64)


def _check(found: np.ndarray, wanted: np.ndarray, magnitudes: np.ndarray, tolerance: float) -> None:
    """Compare the rows that are no padding; unwritten numbers are NaN and fail."""
    assert (np.abs(found[: len(wanted)] - wanted) <= tolerance * magnitudes).all()
