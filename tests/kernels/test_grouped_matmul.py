"""Matmuls with the weights of experts: every implementation against float64, and rows that ignore their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.grouped_matmul import grouped_matmul, reference
from jaxserve_kernels.grouped_matmul.cases import CASES, Case, error, operands
from jaxserve_kernels.grouped_matmul.tiles import most_tiles, tiles_of
from jaxserve_kernels.matmul import matmul
from jaxserve_kernels.ops import as_arrays

Implementation = Callable[..., jax.Array]
pytestmark = pytest.mark.slow

WAYS: dict[str, Implementation] = {  # compiled whole: operation by operation takes ten times as long
    "by tiles": jax.jit(partial(reference.by_tiles, dynamic=False)),
    "by a fixed count of tiles": jax.jit(partial(reference.by_tiles, dynamic=False, has_fixed_count=True)),
    "by rows": jax.jit(partial(reference.by_rows, dynamic=False)),
}


@pytest.mark.parametrize("way", ["by a fixed count of tiles", "by rows"])
@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[6], *CASES[8:]], ids=str)
def test_what_gpus_take_equals_the_matmul_in_float64(case: Case, way: str) -> None:
    given = operands(case)
    assert error(case, given, WAYS[way](*as_arrays(given))) <= 1


def test_what_tpus_take_equals_the_matmul_in_float64() -> None:
    (case,) = [case for case in CASES if case.dtype == "float16"]  # where every expert has rows: CPUs multiply with all
    given = operands(case)
    assert error(case, given, jax.jit(reference.ragged)(*as_arrays(given)[:3])) <= 1


@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn"])
def test_activations_are_quantised_as_in_a_matmul_with_one_expert(weights: str) -> None:
    given = operands(Case((2, 0, 9), 64, 128, weights=weights, dtype="float32"))
    out = grouped_matmul(*as_arrays(given), dynamic=True)
    for expert, rows in ((0, slice(0, 2)), (2, slice(2, 11))):
        alone = matmul(
            *(jnp.asarray(each) for each in (given.x[rows], given.weight[expert], given.scales[expert])), dynamic=True
        )
        np.testing.assert_allclose(out[rows], alone, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_does_not_depend_on_its_neighbours(way: str) -> None:
    """Compare the rows of one expert among other experts, in another place of another tile."""
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((64, 96), np.float32), random.standard_normal((4, 72, 96), np.float32)
    own = x[:5]
    found = []
    for sizes in ((0, 5, 30, 29), (7, 28, 0, 0), (40, 9, 1, 1)):
        first = sizes[0] + min(sizes[1] - 5, 3)
        rows = np.concatenate((x[5 : 5 + first], own, x[5 + first :]))
        found.append(WAYS[way](*map(jnp.asarray, (rows, weight, np.array(sizes, np.int32))), None)[first : first + 5])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_no_weights_are_widened_or_gathered_but_those_of_a_tile(dtype: str) -> None:
    """A CPU keeps aside no more than one of 64 experts in float32, and the rows."""
    shapes = [("bfloat16", (16, 256)), (dtype, (64, 512, 256)), ("int32", (64,)), ("float32", (64, 512))]
    operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for name, shape in shapes]
    compiled = jax.jit(grouped_matmul).lower(*operands[: 3 if dtype == "bfloat16" else 4]).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 512 * 256 * 4


def test_no_experts_in_mxfp4_are_upcast_but_that_of_a_tile() -> None:
    """All 64 experts take 4.5 MB in their blocks and 34 MB in float32; one takes 0.5 MB."""
    shapes = [("float32", (16, 256)), ("uint8", (64, 512, 128)), ("int32", (64,)), ("uint8", (64, 8, 512))]
    operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for name, shape in shapes]
    memory = jax.jit(grouped_matmul).lower(*operands).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2 * 512 * 256 * 4


@pytest.mark.parametrize("num_rows", [1, 7, 64, 1000])
def test_so_many_tiles_are_enough_whatever_the_groups(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    for num_experts in (1, 8, 128):
        size, most = reference.tile_rows(num_rows, num_experts), reference.most_tiles(num_rows, num_experts)
        for spread in (0.1, 1, 100):
            sizes = random.multinomial(num_rows, random.dirichlet(np.full(num_experts, spread)))
            assert (-(-sizes // size)).sum() <= most


def test_every_row_is_in_one_tile_of_its_expert() -> None:
    rows, alignment = 16, 8
    sizes = np.array((0, 3, 16, 0, 1, 70, 0, 5), np.int32)
    tiles = jax.tree.map(np.asarray, tiles_of(jnp.asarray(sizes), 100, rows, alignment))
    count = int(tiles.num_tiles[0])
    assert count <= most_tiles(100, len(sizes), rows, alignment) == len(tiles.starts)
    seen = []
    for expert, start, begin, end in list(zip(*tiles[1:], strict=True))[:count]:
        assert start % alignment == 0
        assert start <= begin < end <= start + rows
        seen += [(row, expert) for row in range(begin, end)]
    assert seen == list(enumerate(np.repeat(np.arange(len(sizes)), sizes)))
