"""Matmuls with GGUF blocks by the kernel for Hopper: interpreted, and its choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels.block_kinds import BLOCK_KINDS, TILE, pack_tiles
from jaxserve_kernels.block_matmul import cases, dequantize_tiles, gpu
from jaxserve_kernels.block_matmul.cases import Case, Operands, random_blocks
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from tests.kernels.gpu_interpreter import gpu_interpreter

STEPS = {name: 128 if kind.num_inputs == 32 else 256 for name, kind in BLOCK_KINDS.items()}


def operands(kind: str, num_tokens: int, num_outputs: int, num_inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x in bfloat16, and tiles of any codes."""
    random, of_kind = np.random.default_rng(num_tokens), BLOCK_KINDS[kind]
    blocks = random_blocks(of_kind, random, num_outputs, num_inputs // of_kind.num_inputs)
    x = random.standard_normal((num_tokens, num_inputs)).astype(ml_dtypes.bfloat16)
    return x, pack_tiles(of_kind, blocks)


def error(kind: str, x: np.ndarray, tiles: np.ndarray, found: jax.Array) -> float:
    """Return the largest error relative to the sum of a result's terms."""
    wide, weight = x.astype(np.float64), np.asarray(dequantize_tiles(BLOCK_KINDS[kind], jnp.asarray(tiles)), np.float64)
    difference = np.abs(np.asarray(found, np.float64) - wide @ weight.T)
    return float((difference / (np.abs(wide) @ np.abs(weight).T)).max())


@pytest.mark.parametrize(
    ("kind", "num_tokens", "workers"), [("Q4_0", 3, 4), ("Q5_1", 3, 2), ("Q8_0", 9, 2), ("Q5_K", 3, 2), ("Q6_K", 9, 4)]
)
def test_the_kernel_for_hopper_multiplies_with_the_weights_of_the_file_without_a_race(
    kind: str, num_tokens: int, workers: int
) -> None:
    """With few programs, so that each does parts of several blocks of outputs, and few stages, so that each is used again."""
    x, tiles = operands(kind, num_tokens, 2 * workers * 64, 3 * STEPS[kind])
    sizes = SkinnyTuning(rows=64, tile=STEPS[kind], stages=2, programs=3, workers=workers)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.block_matmul.gpu import skinny

        arrays = map(jnp.asarray, (x, tiles))
        found = skinny.block_matmul(*arrays, kind=BLOCK_KINDS[kind], tuning=sizes, is_emulated=True)
        jax.block_until_ready(found)
        assert not has_raced()
    assert error(kind, x, tiles, found) <= 1e-6


def expert_operands(case: Case) -> Operands:
    """Return operands of a case whose activations are in bfloat16."""
    given = cases.operands(case)
    return given._replace(x=given.x.astype(ml_dtypes.bfloat16))


EXPERTS = [
    (Case("Q4_0", 12, 2, 256, 12, group_sizes=(3, 0, 9)), GroupedTuning(16, 64, 128, stages=2, programs=3)),
    (Case("Q8_0", 22, 0, 192, 4, group_sizes=(0, 20, 2)), GroupedTuning(16, 64, 128, stages=2, programs=3)),
    (Case("Q4_K", 6, 3, 128, 3, group_sizes=(1, 5, 0)), GroupedTuning(16, 64, 256, stages=2, programs=3)),
    (Case("Q6_K", 70, 0, 128, 1, group_sizes=(70,)), GroupedTuning(64, 64, 256, stages=2, programs=2)),
]
"""Experts without rows, tiles that experts share, blocks of outputs that overlap, and inputs in parts."""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "sizes"), EXPERTS, ids=str)
def test_the_kernel_for_hopper_multiplies_with_the_blocks_of_experts_without_a_race(
    case: Case, sizes: GroupedTuning
) -> None:
    given = expert_operands(case)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.block_matmul.gpu import grouped

        x, tiles, rows = map(jnp.asarray, (*given, np.array(case.group_sizes)))
        kind = BLOCK_KINDS[case.kind]
        found = grouped.grouped_block_matmul(x, tiles, rows, kind=kind, tuning=sizes, is_emulated=True)
        jax.block_until_ready(found)
        assert not has_raced()
    assert cases.error(case, given, found) <= 1


def choice(
    kind: str, num_tokens: int, num_outputs: int, num_inputs: int, dtype: str = "bfloat16"
) -> SkinnyTuning | None:
    of_kind = BLOCK_KINDS[kind]
    tiles = (num_outputs // TILE, num_inputs // of_kind.num_inputs, of_kind.tile_bytes)
    x = jax.ShapeDtypeStruct((num_tokens, num_inputs), jnp.dtype(dtype))
    return gpu.choice(x, jax.ShapeDtypeStruct(tiles, jnp.uint8), of_kind)


def test_the_kernel_is_taken_for_few_tokens_of_its_types_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    assert choice("Q4_0", 1, 4096, 4096) == SkinnyTuning(rows=64, tile=128, stages=8, programs=132, workers=4)
    assert choice("Q4_K", 64, 6144, 4096) == SkinnyTuning(rows=64, tile=256, stages=2, programs=132, workers=4)
    assert choice("Q6_K", 128, 4096, 14336) == SkinnyTuning(rows=64, tile=256, stages=2, programs=132)
    assert choice("Q8_0", 8, 6144 + 128, 4096) == SkinnyTuning(rows=64, tile=128, stages=8, programs=132)
    assert choice("Q4_K", 129, 4096, 4096) is None
    assert choice("Q4_0", 8, 4096, 4096 + 32) is None, "a part of a step"
    assert choice("Q4_0", 8, 4096 + 64, 4096) is None, "outputs for one worker of two"
    assert choice("Q4_0", 8, 4096, 4096, "float16") is None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        assert choice("Q4_0", 8, 4096, 4096) is None, "XLA cannot split it"


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("num_tokens", [1, 64, 128])
def test_the_steps_in_flight_fit_shared_memory(monkeypatch: pytest.MonkeyPatch, kind: str, num_tokens: int) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    sizes, padded = choice(kind, num_tokens, 4096, 4096), -(-num_tokens // 8) * 8
    assert sizes is not None and sizes.stages >= 2
    weight_bytes = sizes.block // TILE * (sizes.tile // BLOCK_KINDS[kind].num_inputs) * BLOCK_KINDS[kind].tile_bytes
    assert sizes.stages * (weight_bytes + 2 * sizes.tile * padded + 4 * sizes.tile // 32 * padded) <= 227 << 10


def grouped_choice(
    kind: str, num_rows: int, num_experts: int, num_outputs: int, num_inputs: int, dtype: str = "bfloat16"
) -> GroupedTuning | None:
    of_kind = BLOCK_KINDS[kind]
    tiles = (num_experts, num_outputs // TILE, num_inputs // of_kind.num_inputs, of_kind.tile_bytes)
    x = jax.ShapeDtypeStruct((num_rows, num_inputs), jnp.dtype(dtype))
    return gpu.grouped_choice(x, jax.ShapeDtypeStruct(tiles, jnp.uint8), of_kind)


def test_the_kernel_for_experts_is_taken_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    few = grouped_choice("Q4_K", 8, 128, 1536, 2048)
    assert few is not None
    assert (few.rows, few.outputs, few.inputs) == (16, 64, 256)
    many = grouped_choice("Q6_K", 16_384, 128, 2048, 768)
    assert many is not None
    assert many.rows == 64 and many.stages >= 2
    assert grouped_choice("Q4_0", 8, 128, 192, 768) is not None
    assert grouped_choice("Q4_0", 8, 128, 64, 768) is None, "outputs of one worker"
    assert grouped_choice("Q4_K", 8, 128, 1536, 2048 + 128) is None, "a part of a step"
    assert grouped_choice("Q4_K", 8, 128, 1536, 2048, "float16") is None


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("num_rows", [8, 1024, 16_384])
def test_the_steps_of_experts_in_flight_fit_shared_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str, num_rows: int
) -> None:
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    sizes = grouped_choice(kind, num_rows, 128, 1536, 2048)
    assert sizes is not None and sizes.stages >= 2
    weight_bytes = (
        2 * sizes.outputs // TILE * (sizes.inputs // BLOCK_KINDS[kind].num_inputs) * BLOCK_KINDS[kind].tile_bytes
    )
    assert (
        sizes.stages * (weight_bytes + 2 * sizes.inputs * sizes.rows + 4 * sizes.inputs // 32 * sizes.rows) <= 227 << 10
    )
