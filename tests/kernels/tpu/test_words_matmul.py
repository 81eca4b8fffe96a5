"""Matmuls with weights in words for TPUs, interpreted on the CPU with the race detector, against float64."""

from __future__ import annotations

import functools

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels import nvfp4
from jaxserve_kernels.block_kinds import BLOCK_KINDS, BlockKind
from jaxserve_kernels.block_matmul import block_matmul, dequantize, dequantize_rows, grouped_block_matmul
from jaxserve_kernels.block_matmul import tpu as blocks
from jaxserve_kernels.block_matmul.cases import random_blocks
from jaxserve_kernels.block_matmul.reference import round_inputs
from jaxserve_kernels.grouped_matmul import grouped_matmul
from jaxserve_kernels.grouped_matmul import tpu as experts
from jaxserve_kernels.matmul import tpu as matmul
from jaxserve_kernels.matmul.tpu import WordsTuning, words_choice
from jaxserve_kernels.tpu_words import num_words, pack_blocks, pack_numbers

from tests.kernels.test_nvfp4_gpu import expected, operands
from tests.kernels.tpu_interpreter import QUICKLY, tpu_interpreter

IN_CI = ("Q5_1", "Q6_K")
"""Types of blocks with a minimum and a fifth bit apart, and with scales of scales."""
KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if name in IN_CI else pytest.mark.exhaustive, id=name)
        for name, kind in BLOCK_KINDS.items()
    ],
)
SMALL = WordsTuning(rows=16, outputs=128, vmem_bytes=32 << 20)
"""Two tiles of rows; the second block of 192 outputs is half outside of the arrays."""
NUM_OUTPUTS, NUM_INPUTS, NUM_TOKENS = 192, 512, 19


def stored(kind: BlockKind, num_outputs: int = NUM_OUTPUTS) -> np.ndarray:
    return random_blocks(kind, np.random.default_rng(kind.index), num_outputs, NUM_INPUTS // kind.num_inputs)


def activations() -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((NUM_TOKENS + 2, NUM_INPUTS)).astype(ml_dtypes.bfloat16)
    x[NUM_TOKENS:] = np.nan  # padding
    return x


def dequantised(kind: BlockKind, blocks: np.ndarray) -> np.ndarray:
    """Return the weights as the gguf package dequantises them."""
    wide: np.ndarray = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])
    return wide


@pytest.mark.slow
@pytest.mark.newest
@KINDS
def test_the_kernel_multiplies_with_the_blocks_of_experts(kind: BlockKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts share tiles, and rows of one are in several; one expert has no rows."""
    monkeypatch.setattr(blocks, "grouped_choice", lambda *_: SMALL)
    sizes, x, rows = (3, 0, 14, 2), activations(), stored(kind, 4 * NUM_OUTPUTS)
    words = jnp.stack([jnp.asarray(pack_blocks(kind, each)) for each in np.split(rows, 4)])
    multiply = functools.partial(grouped_block_matmul, kind=kind, backend="mosaic_tpu")
    with tpu_interpreter(num_cores=1):
        found = jax.jit(multiply, compiler_options=QUICKLY)(jnp.asarray(x), words, jnp.array(sizes))
    weights = np.split(dequantised(kind, rows).astype(ml_dtypes.bfloat16).astype(np.float64), 4)
    for row, expert in enumerate(np.repeat(np.arange(4), sizes)):
        own = x[row].astype(np.float64)
        size = np.abs(own) @ np.abs(weights[expert]).T
        assert (np.abs(np.asarray(found)[row] - own @ weights[expert].T) <= 1e-6 * size).all()


@pytest.mark.slow
@pytest.mark.newest
@KINDS
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_kernel_multiplies_with_the_weights_of_the_file(
    kind: BlockKind, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are rounded to bfloat16 once."""
    monkeypatch.setattr(blocks, "words_choice", lambda *_: SMALL)
    x, rows = activations(), stored(kind)
    multiply = functools.partial(block_matmul, kind=kind, dynamic=dynamic, backend="mosaic_tpu")
    with tpu_interpreter(num_cores=1):
        arrays = map(jnp.asarray, (x, pack_blocks(kind, rows)))
        found = jax.block_until_ready(jax.jit(multiply, compiler_options=QUICKLY)(*arrays))
    given = np.asarray(round_inputs(jnp.asarray(x)) if dynamic else x, np.float64)[:NUM_TOKENS]
    weights = dequantised(kind, rows).astype(ml_dtypes.bfloat16).astype(np.float64)
    error = np.abs(np.asarray(found, np.float64)[:NUM_TOKENS] - given @ weights.T)
    assert (error <= 1e-6 * (np.abs(given) @ np.abs(weights).T)).all()


@pytest.mark.slow
@pytest.mark.newest
@KINDS
def test_words_dequantise_to_the_bits_of_the_gguf_package(kind: BlockKind) -> None:
    """Scales are any float16 numbers but infinity: subnormal ones and NaN are among them."""
    rows, random = stored(kind, 64), np.random.default_rng(2)
    by_block = rows.reshape(64, -1, kind.stored_bytes)
    for at in (208,) if kind.name == "Q6_K" else (0, 2) if kind.has_minimum else (0,):
        bits = random.integers(0, 1 << 16, (*by_block.shape[:2], 1)).astype(np.uint16)
        bits[::7] &= 0x83FF
        by_block[..., at : at + 2] = np.where(bits & 0x7FFF == 0x7C00, 0x7E00, bits).astype(np.uint16).view(np.uint8)
    words = jnp.asarray(pack_blocks(kind, rows))
    assert words.shape == (num_words(kind, NUM_INPUTS), 64)
    # 6-bit factors of two levels take a byte each; words are padded to whole sublanes
    assert words.nbytes <= 1.03 * rows.nbytes + 7 * 4 * 64
    with np.errstate(all="ignore"):
        wanted = dequantised(kind, rows)
    np.testing.assert_array_equal(dequantize(kind, words), wanted)
    chosen = np.array([17, 0, 63, 17])
    np.testing.assert_array_equal(dequantize_rows(kind, words, jnp.asarray(chosen)), wanted[chosen])


@pytest.mark.slow
@pytest.mark.newest
@KINDS
def test_each_share_of_the_inputs_has_its_codes_and_scales(kind: BlockKind) -> None:
    rows = stored(kind)
    shares = np.split(pack_blocks(kind, rows, num_shares=2), 2)
    found = [np.asarray(dequantize(kind, jnp.asarray(share))) for share in shares]
    np.testing.assert_array_equal(np.concatenate(found, axis=1), dequantised(kind, rows))


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_nvfp4_in_words_is_multiplied_exactly(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers with all scales but NaN: products of both are exact in bfloat16."""
    monkeypatch.setattr(nvfp4, "words_choice", lambda *_: SMALL)
    monkeypatch.setattr("jaxserve_kernels.matmul.tpu.words.has_bfloat16", lambda: has_bfloat16)
    x, values, of_blocks = operands(NUM_TOKENS, NUM_OUTPUTS, NUM_INPUTS, 16)
    matrix = np.random.default_rng(0).uniform(0.5, 900, (2, NUM_OUTPUTS)).astype(np.float32)
    scales = nvfp4.TwoLevelScales(jnp.asarray(of_blocks), jnp.asarray(matrix))
    words = jnp.asarray(pack_numbers(values))
    assert words.shape == (NUM_INPUTS // 8, NUM_OUTPUTS)
    np.testing.assert_array_equal(nvfp4.bytes_of(words), values)
    multiply = jax.jit(functools.partial(nvfp4.matmul, backend="mosaic_tpu"), compiler_options=QUICKLY)
    with tpu_interpreter(num_cores=1):
        found = jax.block_until_ready(multiply(jnp.asarray(x), words, scales))
    of_matrix = matrix[0].astype(np.float64) / matrix[1]
    wanted, sizes = (each * of_matrix for each in expected(x, values, of_blocks))
    assert (np.abs(np.asarray(found) - wanted) <= 1e-6 * sizes).all()
    by_xla = nvfp4.matmul(jnp.asarray(x), words, scales)
    assert (np.abs(np.asarray(by_xla) - wanted) <= 1e-6 * sizes).all()


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize(
    "group_sizes",
    [(0, 9, 0, 2, 40), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ((3, 0), (0,) * 9 + (4, 0)))],
    ids=str,
)
def test_rows_are_multiplied_with_the_words_of_their_expert(
    group_sizes: tuple[int, ...], has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts share tiles, and rows of one are in several; scales of experts without rows are NaN, and so is padding."""
    monkeypatch.setattr(experts, "words_choice", lambda *_: SMALL)
    monkeypatch.setattr("jaxserve_kernels.matmul.tpu.words.has_bfloat16", lambda: has_bfloat16)
    num_rows, num_experts = sum(group_sizes), len(group_sizes)
    matrices = [operands(seed + 1, NUM_OUTPUTS, NUM_INPUTS, 16)[1:] for seed in range(num_experts)]
    blocks_of = np.stack([blocks for _, blocks in matrices])
    blocks_of[np.array(group_sizes) == 0] = np.nan
    matrix = np.random.default_rng(0).uniform(0.5, 900, (num_experts, 2, NUM_OUTPUTS)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((num_rows + 3, NUM_INPUTS)).astype(ml_dtypes.bfloat16)
    x[num_rows:] = np.nan
    scales = nvfp4.TwoLevelScales(jnp.asarray(blocks_of), jnp.asarray(matrix))
    words = jnp.asarray(np.stack([pack_numbers(values) for values, _ in matrices]))
    given = jnp.asarray(x), words, jnp.asarray(group_sizes, jnp.int32), scales
    multiply = jax.jit(functools.partial(grouped_matmul, backend="mosaic_tpu"), compiler_options=QUICKLY)
    with tpu_interpreter(num_cores=1):
        found = np.asarray(jax.block_until_ready(multiply(*given)), np.float64)
    by_xla = np.asarray(grouped_matmul(*given), np.float64)
    for row, expert in enumerate(np.repeat(np.arange(num_experts), group_sizes)):
        of_matrix = matrix[expert, 0].astype(np.float64) / matrix[expert, 1]
        wanted, sizes = (each[0] * of_matrix for each in expected(x[row : row + 1], *matrices[expert]))
        assert (np.abs(found[row] - wanted) <= 1e-6 * sizes).all()
        assert (np.abs(by_xla[row] - wanted) <= 2**-8 * sizes).all()


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("num_results", [1, 5, 130])
def test_columns_are_those_of_the_words(num_results: int) -> None:
    """More results than lanes, the same column twice, and columns of which there are none: those are clamped."""
    random = np.random.default_rng(num_results)
    words = random.integers(-(2**31), 2**31, (24, 384)).astype(np.int32)
    indices = np.concatenate([random.integers(-9, 400, num_results - 1), [383, 383]])
    with tpu_interpreter(num_cores=1):
        found = jax.block_until_ready(
            jax.jit(functools.partial(matmul.take_columns, backend="mosaic_tpu"), compiler_options=QUICKLY)(
                jnp.asarray(words), jnp.asarray(indices)
            )
        )
    np.testing.assert_array_equal(found, words[:, indices.clip(0, 383)])


def choice(
    num_tokens: int, num_inputs: int, num_outputs: int, kind: str = "Q4_K", dtype: str = "bfloat16"
) -> WordsTuning | None:
    x = jax.ShapeDtypeStruct((num_tokens, num_inputs), jnp.dtype(dtype))
    return words_choice(x, num_outputs, 4 * num_words(BLOCK_KINDS[kind], num_inputs))


def test_the_kernel_is_taken_for_any_number_of_rows_of_whole_units_and_lanes() -> None:
    sizes = {each: choice(*each) for each in ((1, 4096, 4096), (33, 4096, 6144), (2048, 4096, 1024))}
    assert [(each.rows, each.outputs) for each in sizes.values() if each] == [(16, 512), (48, 512), (256, 512)]
    long = choice(2048, 14336, 4096)
    assert long is not None and (long.rows, long.outputs) == (128, 128), "all inputs at once"
    wide = choice(8, 4096, 4096, "Q8_0")
    assert wide is not None and wide.outputs == 256
    assert choice(8, 4096 + 128, 4096) is None, "half a unit"
    assert choice(8, 4096, 4096 + 64) is None, "half the lanes"
    assert choice(8, 4096, 4096, dtype="float32") is None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        assert choice(8, 4096, 4096) is None, "XLA cannot split it"


def test_few_rows_of_an_expert_have_small_tiles() -> None:
    def rows(num_rows: int, num_inputs: int = 2048) -> int | None:
        words = jax.ShapeDtypeStruct((128, num_inputs // 8, 1536), jnp.int32)
        x = jax.ShapeDtypeStruct((num_rows, num_inputs), jnp.bfloat16)
        found = experts.words_choice(x, words, jax.ShapeDtypeStruct((128, num_inputs // 16, 1536), jnp.float8_e4m3fn))
        return None if found is None else found.rows

    assert [rows(count) for count in (8, 256, 4096, 1 << 17)] == [16, 32, 128, 256]
    assert rows(256, 2048 + 128) is None, "half a unit"


@KINDS
@pytest.mark.parametrize("num_inputs", [512, 4096, 14336, 28672])
def test_what_is_fetched_fits_vmem(kind: BlockKind, num_inputs: int) -> None:
    sizes = choice(4096, num_inputs, 8192, kind.name)
    assert sizes is not None
    fetched = 2 * num_inputs * sizes.rows + 4 * num_words(kind, num_inputs) * sizes.outputs
    results = 4 * sizes.rows * sizes.outputs
    upcast = 256 * 4 * 3 * sizes.outputs
    assert 2 * (fetched + results) + upcast <= sizes.vmem_bytes
    assert matmul.load("tpu")["words"]["vmem_bytes"] <= 32 << 20, "half of the smallest VMEM"
