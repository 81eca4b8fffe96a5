"""The native CPU kernels against the reference ops, and what only they promise: rows that ignore their neighbours.

Built first where there is a C++ compiler; visibly skipped where there is none.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels import mxfp4, native, nvfp4
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.grouped_matmul import api as experts
from jaxserve_kernels.grouped_matmul import cases
from jaxserve_kernels.grouped_matmul.reference import Scales
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.matmul import api as dense
from jaxserve_kernels.matmul import quantize_rows
from jaxserve_kernels.native.build import BuildError, build
from jaxserve_kernels.paged_attention import Paging, Scoring, ragged_layout
from jaxserve_kernels.paged_attention import api as attention
from jaxserve_kernels.rope import Rotation
from jaxtyping import Array

pytestmark = pytest.mark.slow

# One program for each call: one for each of its operations takes three times as long to compile.
matmul = jax.jit(dense.matmul, static_argnames=("dynamic", "backend", "dtype"))
matmuls = jax.jit(dense.matmuls, static_argnames=("dynamic", "backend", "dtype"))
grouped_matmul = jax.jit(experts.grouped_matmul, static_argnames=("dynamic", "backend"))
write_and_attend = jax.jit(
    attention.write_and_attend, static_argnames=("scoring", "backend", "shards", "is_written", "has_short_rows")
)
write = jax.jit(attention.write, static_argnames=("num_heads", "scoring", "backend", "shards"))

L, P, K, S, H, N = 2, 40, 2, 16, 32, 6
LAYER = 1
SCALE = 0.3


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    native.register()


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _chosen(request: pytest.FixtureRequest) -> Backend:
    if request.param == "native_matrix" and not native.has_amx():
        pytest.skip("this processor has no AMX")
    chosen: Backend = request.param
    return chosen


@pytest.fixture(params=["native", "native_matrix"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Return each unit of the processor that multiplies floats."""
    return _chosen(request)


# One row, a tile, its rest, more than a block; outputs that fill no tile, or end inside a task.
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 576, 192), (4, 64, 7), (7, 128, 61), (13, 48, 300), (131, 64, 65)]
)
@pytest.mark.versions
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_matmul_equals_the_reference(tokens: int, inputs: int, outputs: int, dtype: str, backend: Backend) -> None:
    x, weight = jnp.asarray(_normal(1, tokens, inputs)), jnp.asarray(_normal(2, outputs, inputs)).astype(dtype)
    expected = matmul(x, weight.astype("float32"))
    np.testing.assert_allclose(matmul(x, weight, backend=backend), expected, atol=1e-4 * inputs**0.5)


def test_padding_rows_are_zeros_and_change_nothing(backend: Backend) -> None:
    x, weight = jnp.asarray(_normal(1, 9, 64)), jnp.asarray(_normal(2, 70, 64))
    padded = np.asarray(matmul(x, weight, None, jnp.int32(4), backend=backend))
    np.testing.assert_array_equal(padded[:4], matmul(x[:4], weight, backend=backend))
    assert not padded[4:].any()


@pytest.mark.versions
@pytest.mark.parametrize("tokens", [1, 3, 32])
def test_matmul_with_int8_weights_equals_the_reference(tokens: int, backend: Backend) -> None:
    x = jnp.asarray(_normal(1, tokens, 96))
    values, scales = quantize_rows(jnp.asarray(_normal(2, 70, 96)))
    expected = matmul(x, values, scales)
    np.testing.assert_allclose(matmul(x, values, scales, backend=backend), expected, atol=1e-4)


@pytest.mark.versions
@pytest.mark.parametrize(("tokens", "outputs"), [(1, 70), (3, 64), (32, 61), (131, 9)])
def test_int8_matmul_equals_the_reference(tokens: int, outputs: int) -> None:
    x = jnp.asarray(_normal(1, tokens, 192)).at[0].set(0.0)
    values, scales = quantize_rows(jnp.asarray(_normal(2, outputs, 192)))
    values = values.at[0, :].set(-128)  # the least int8 there is
    expected = matmul(x, values, scales, dynamic=True)
    result = matmul(x, values, scales, jnp.int32(tokens), dynamic=True, backend="native")
    assert (
        "jaxserve_matmul_int8"
        in jax.jit(matmul, static_argnames=("dynamic", "backend"))
        .lower(x, values, scales, dynamic=True, backend="native")
        .as_text()
    )
    np.testing.assert_allclose(result, expected, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8-weight-only", "int8"])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (5, 3), (40, 3), (530, 523)])
def test_matmuls_of_one_input_are_one_call_with_the_bits_of_each(
    tokens: int, rows: int, dtype: str, backend: Backend
) -> None:
    """Some outputs end within the tasks of threads, and within tiles, and some are many; tokens after the real rows are padding."""
    dynamic = dtype == "int8"
    x, num_rows = jnp.asarray(_normal(1, tokens, 128)), jnp.int32(rows)
    weights = [jnp.asarray(_normal(seed, outputs, 128)) for seed, outputs in ((2, 160), (3, 37), (4, 1), (5, 4250))]
    scales: list[Array] = []
    if dtype.startswith("int8"):
        weights, scales = map(list, zip(*map(quantize_rows, weights), strict=True))
    else:
        weights = [weight.astype(dtype) for weight in weights]
    together = partial(matmuls, dynamic=dynamic, backend=backend)
    program = jax.jit(together).lower(x, weights, scales, num_rows).as_text()
    assert program.count("custom_call @jaxserve_matmul") == 1
    found = together(x, weights, scales, num_rows)
    for i, (weight, y) in enumerate(zip(weights, found, strict=True)):
        own = scales[i] if scales else None
        alone = matmul(x, weight, own, num_rows, dynamic=dynamic, backend=backend)
        np.testing.assert_array_equal(y, alone)


def test_matmuls_of_several_types_are_computed_one_by_one() -> None:
    x = jnp.asarray(_normal(1, 3, 64))
    weights = [jnp.asarray(_normal(2, 32, 64)), jnp.asarray(_normal(3, 48, 64)).astype("bfloat16")]
    found = matmuls(x, weights, backend="native")
    for weight, y in zip(weights, found, strict=True):
        np.testing.assert_array_equal(y, matmul(x, weight, backend="native"))


def test_inputs_that_fill_no_vector_go_through_the_reference() -> None:
    x, weight = jnp.asarray(_normal(1, 3, 20)), jnp.asarray(_normal(2, 5, 20))
    np.testing.assert_array_equal(matmul(x, weight, backend="native"), matmul(x, weight))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8-weight-only", "int8"])
@pytest.mark.parametrize("inputs", [192, 1616])
def test_a_row_of_a_matmul_does_not_depend_on_the_others(inputs: int, dtype: str, backend: Backend) -> None:
    """Few rows, more of them that are packed, and so many that they are packed in parts. Activations beside int8 are quantised."""
    dynamic = dtype == "int8"
    inputs -= inputs % 64 if dynamic else 0
    x, weight = jnp.asarray(_normal(1, 1100, inputs)), jnp.asarray(_normal(2, 123, inputs))
    stored, scales = quantize_rows(weight) if dtype.startswith("int8") else (weight.astype(dtype), None)
    together = matmul(x, stored, scales, dynamic=dynamic, backend=backend)
    few = [list(range(20, 20 + count)) for count in (1, 2, 3, 4)]  # each is read by a loop of its own
    for rows in (*few, list(range(40, 57)), list(range(7, 80)), list(range(100, 230)), list(range(1090, 1100))):
        alone = matmul(x[np.array(rows)], stored, scales, dynamic=dynamic, backend=backend)
        np.testing.assert_array_equal(alone, together[np.array(rows)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 576, 96), (5, 48, 33), (33, 1536, 100), (200, 64, 31)])
def test_sums_are_as_good_as_those_of_float32(
    tokens: int, inputs: int, outputs: int, dtype: str, backend: Backend
) -> None:
    """Numbers of all bits and of many sizes: a plane that were left out would show (2e-6 and more)."""
    x = _normal(1, tokens, inputs) * np.exp2(np.random.default_rng(3).integers(-20, 20, (tokens, inputs)))
    weight = _normal(2, outputs, inputs) * np.exp2(np.random.default_rng(4).integers(-6, 6, (outputs, inputs)))
    x, stored = x.astype(np.float32), jnp.asarray(weight if dtype != "int8" else weight.clip(-128, 127)).astype(dtype)
    scales = None if dtype != "int8" else jnp.linspace(0.1, 3.0, outputs, dtype=jnp.float32)
    found = np.asarray(matmul(jnp.asarray(x), stored, scales, backend=backend))
    wide = np.asarray(stored).astype(np.float64) * (1.0 if scales is None else np.asarray(scales, np.float64)[:, None])
    sizes = np.abs(x).astype(np.float64) @ np.abs(wide).T
    assert (np.abs(found - x.astype(np.float64) @ wide.T) <= 7e-7 * sizes).all()


FLOAT_CASES = [case for case in cases.CASES if case.weights in ("float32", "float16", "bfloat16", "int8")]


@pytest.mark.versions
@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
def test_grouped_matmul_equals_the_one_in_float64(case: cases.Case, backend: Backend) -> None:
    given = cases.operands(case)
    wanted, sizes = cases.expected(case, given)
    operands = [None if each is None else jnp.asarray(each) for each in given]
    result = np.asarray(grouped_matmul(*operands, backend=backend))
    assert (np.abs(result[: len(wanted)] - wanted) <= 1e-6 * sizes).all()
    assert not result[len(wanted) :].any(), "padding"


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_row_of_a_grouped_matmul_is_that_of_its_expert_alone(dtype: str, backend: Backend) -> None:
    """Bit for bit, whatever the groups, and with int8 by int8 as well."""
    dynamic, group_sizes = dtype == "int8", (3, 0, 17, 1, 0, 40)
    x, weight, scales = jnp.asarray(_normal(1, 70, 192)), jnp.asarray(_normal(2, 6, 101, 192)), None
    if dynamic:
        weight, scales = jax.vmap(quantize_rows)(weight)
    options = {"dynamic": dynamic, "backend": backend}
    together = grouped_matmul(x, weight, jnp.asarray(group_sizes), scales, **options)
    starts = np.cumsum(group_sizes)
    for expert, (end, count) in enumerate(zip(starts, group_sizes, strict=True)):
        if count:
            own = None if scales is None else scales[expert]
            alone = matmul(x[end - count : end], weight[expert], own, **options)
            np.testing.assert_array_equal(together[end - count : end], alone)


class Step:
    """A step of `counts[b]` tokens in row b, which then has `lengths[b]` keys; the last rows are padding."""

    def __init__(
        self,
        counts: list[int],
        lengths: list[int],
        *,
        num_tokens: int,
        num_pages: int,
        num_rows: int = 0,
        seed: int = 1,
    ) -> None:
        rows = max(num_rows, len(counts) + 1)
        rng = np.random.default_rng(seed)
        tables = np.zeros((rows, num_pages), np.int32)
        tables[: len(counts)] = rng.permutation(P - 1)[: len(counts) * num_pages].reshape(-1, num_pages) + 1
        starts = np.full(rows + 1, sum(counts), np.int32)
        starts[: len(counts) + 1] = np.concatenate(([0], np.cumsum(counts)))
        pages, slots = np.zeros((2, num_tokens), np.int32)
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            positions = np.arange(length - count, length)
            pages[starts[row] : starts[row] + count] = tables[row, positions // S]
            slots[starts[row] : starts[row] + count] = positions % S
        self.num_real = sum(counts)
        self.kv_lengths = np.array([*lengths, *[0] * (rows - len(lengths))], np.int32)
        num_decode = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        ragged = ragged_layout(jnp.asarray(starts), jnp.int32(num_decode), num_tokens=num_tokens)
        arrays = map(jnp.asarray, (tables, self.kv_lengths, starts, pages, slots))
        self.paging = Paging(*arrays, ragged)

    def tokens(self) -> list[jax.Array]:
        num_tokens = len(self.paging.pages)
        return [jnp.asarray(_normal(seed, num_tokens, heads, H)) for seed, heads in ((3, N), (4, K), (5, K))]


FLOAT4 = {"mxfp4": (32, 16, 8), "nvfp4": (16, 8)}
"""Inputs of a block of each format: as published, and as devices that split them have it."""


def _float4(kind: str, block: int, experts: int, outputs: int, inputs: int) -> tuple[Array, Scales, np.ndarray]:
    """Return random weights in e2m1, their scales, and the float32 weights that they mean."""
    random = np.random.default_rng(block)
    values = jnp.asarray(random.integers(0, 256, (experts, outputs, inputs // 2), np.uint8))
    shape = (experts, inputs // block, outputs)
    if kind == "mxfp4":
        exponents = jnp.asarray(random.integers(107, 132, shape, np.uint8))
        one = jax.vmap(lambda values, scales: mxfp4.dequantize(values, scales, jnp.float32))
        return values, exponents, np.asarray(one(values, exponents))
    blocks = random.integers(0, 127, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    matrix = random.uniform(0.5, 900, (experts, 2, outputs)).astype(np.float32)
    scales = nvfp4.TwoLevelScales(jnp.asarray(blocks), jnp.asarray(matrix))
    wide = [
        nvfp4.dequantize(*each, jnp.float32) for each in zip(values, map(nvfp4.TwoLevelScales, *scales), strict=True)
    ]
    return values, scales, np.stack(wide)


# Outputs that fill no tile; experts with no row, one, a tile and its rest, and more than a block of rows.
@pytest.mark.versions
@pytest.mark.parametrize(("kind", "block"), [(kind, block) for kind, blocks in FLOAT4.items() for block in blocks])
@pytest.mark.parametrize(("sizes", "outputs", "inputs"), [((0, 1, 3, 0, 13), 61, 64), ((2, 120), 300, 32)])
def test_e2m1_weights_give_the_bits_of_dequantised_ones(
    kind: str, block: int, sizes: tuple[int, ...], outputs: int, inputs: int
) -> None:
    values, scales, wide = _float4(kind, block, len(sizes), outputs, inputs)
    x = _normal(1, sum(sizes) + 3, inputs)
    x[sum(sizes) :] = np.nan
    found, expected = (
        np.asarray(grouped_matmul(jnp.asarray(x), weight, jnp.asarray(sizes), own, backend="native"))
        for weight, own in ((values, scales), (jnp.asarray(wide), None))
    )
    np.testing.assert_array_equal(found, expected)
    assert not found[sum(sizes) :].any(), "padding rows"


@pytest.mark.parametrize("kind", FLOAT4)
def test_a_row_of_a_matmul_with_e2m1_weights_does_not_depend_on_the_others(kind: str) -> None:
    """Nor on the rows of other experts."""
    values, scales, _ = _float4(kind, 16, 2, 61, 96)
    x, first = _normal(1, 150, 96), 20  # rows of the first expert

    def compute(rows: list[int]) -> np.ndarray:
        sizes = jnp.asarray([sum(row < first for row in rows), sum(row >= first for row in rows)])
        return np.asarray(grouped_matmul(jnp.asarray(x[rows]), values, sizes, scales, backend="native"))

    together = compute(list(range(150)))
    for rows in ([0], [149], [5, 6, 40], list(range(17, 60)), list(range(100, 150))):
        np.testing.assert_array_equal(compute(rows), together[rows])


def test_a_dense_matmul_in_nvfp4_is_that_of_one_expert() -> None:
    values, scales, wide = _float4("nvfp4", 16, 1, 70, 96)
    own = nvfp4.TwoLevelScales(*(each[0] for each in scales))
    x = jnp.asarray(_normal(1, 9, 96))
    found = nvfp4.matmul(x, values[0], own, jnp.int32(4), backend="native")
    np.testing.assert_array_equal(found, matmul(x, jnp.asarray(wide[0]), None, jnp.int32(4), backend="native"))
    assert (
        "jaxserve_float4_matmul"
        in jax.jit(lambda x: nvfp4.matmul(x, values[0], own, backend="native")).lower(x).as_text()
    )


def test_e2m1_weights_whose_inputs_fill_no_vector_are_left_to_the_reference() -> None:
    values, scales, wide = _float4("mxfp4", 8, 2, 5, 24)
    x, sizes = jnp.asarray(_normal(1, 4, 24)), jnp.asarray([1, 3])
    found = grouped_matmul(x, values, sizes, scales, backend="native")
    np.testing.assert_allclose(found, grouped_matmul(x, jnp.asarray(wide), sizes), rtol=1e-5, atol=1e-3)


def _pools(paging: Paging) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return a random pool as the reference stores it, and as the native kernel does."""
    k, v = _normal(7, L, P, K, S, H), _normal(8, L, P, K, S, H)
    k[:, 0] = v[:, 0] = np.nan  # nothing of the null page may be seen
    own = np.ascontiguousarray(k.swapaxes(3, 4)).reshape(k.shape)
    return [jnp.asarray(np.nan_to_num(k)), jnp.asarray(np.nan_to_num(v))], [jnp.asarray(own), jnp.asarray(v)]


CASES = [
    ([1], [1]),
    ([1, 1, 1], [1, 64, 65]),
    ([1, 1, 1], [16, 17, 96]),
    ([1, 5, 9], [40, 5, 30]),
    ([96], [96]),
    ([33, 50], [64, 90]),
    ([7, 1, 8], [20, 9, 8]),
]


WINDOWS = [
    (None, False, True, False),
    pytest.param(20, False, False, True, marks=pytest.mark.versions),
    (20, True, True, False),
    *((window, False, True, False) for window in (1, 70)),
    (70, True, False, True),
]


@pytest.mark.parametrize(("window", "is_chunked", "rotates", "has_sinks"), WINDOWS)
@pytest.mark.parametrize(("counts", "lengths"), CASES)
def test_attention_equals_the_reference(
    counts: list[int], lengths: list[int], window: int | None, is_chunked: bool, rotates: bool, has_sinks: bool
) -> None:
    step = Step(counts, lengths, num_tokens=100, num_pages=6, num_rows=4)  # one shape for all: compiled once
    pool, native_pool = _pools(step.paging)
    angles = _normal(9, 100, H // 2)
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles)) if rotates else None
    sinks = jnp.asarray(3 * _normal(10, N)) if has_sinks else None
    scoring = Scoring(SCALE, sliding_window=window, is_chunked=is_chunked)
    options = {"rotation": rotation, "scoring": scoring, "sinks": sinks}
    expected, k, v = write_and_attend(*step.tokens(), *pool, jnp.int32(LAYER), step.paging, **options)
    out, own_k, own_v = write_and_attend(
        *step.tokens(), *native_pool, jnp.int32(LAYER), step.paging, **options, backend="native"
    )
    assert np.isfinite(out).all()
    real = step.num_real
    np.testing.assert_allclose(out[:real], expected[:real], atol=2e-5)
    own_k = np.asarray(own_k).reshape(L, P, K, H, S).swapaxes(3, 4)
    np.testing.assert_allclose(own_k[:, 1:], np.asarray(k)[:, 1:], atol=1e-6 if rotates else 0)
    np.testing.assert_array_equal(np.asarray(own_v)[:, 1:], np.asarray(v)[:, 1:])


def test_float32_pages_take_neither_nan_nor_infinity() -> None:
    """Padding tokens write to the null page, and the values of keys that a window hides are multiplied by zero."""
    step = Step([1], [65], num_tokens=4, num_pages=6)
    released = step.paging._replace(block_tables=step.paging.block_tables.at[0, :2].set(0))
    q, *given = step.tokens()
    bad = [each.at[1:, :, :3].set(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf])) for each in given]
    options = {"scoring": Scoring(SCALE, sliding_window=20), "backend": "native"}
    pool = [jnp.zeros((L, P, K, S, H))] * 2
    expected, *_ = write_and_attend(q, *given, *pool, jnp.int32(LAYER), released, **options)
    out, *pool = write_and_attend(q, *bad, *pool, jnp.int32(LAYER), released, **options)
    np.testing.assert_array_equal(out[0], expected[0])
    largest = np.finfo(np.float32).max
    assert np.asarray(pool[1])[LAYER, 0, 0, 0, :3].tolist() == [0, largest, -largest]
    assert all(np.isfinite(each).all() for each in pool)


def _8_bit_pools(dtype: str) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return a random pool as the reference stores it, and as the native kernel does. dtype uint8: bits of e4m3 from -128 to 128."""
    random = np.random.default_rng(3)
    k, v = (random.integers(-128, 128, (L, P, K, S, H)).astype(np.int8) for _ in range(2))
    if dtype == "uint8":
        k, v = (each.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for each in (k, v))
    own = np.ascontiguousarray(k.swapaxes(3, 4)).reshape(k.shape)
    return [jnp.asarray(k), jnp.asarray(v)], [jnp.asarray(own), jnp.asarray(v)]


@pytest.mark.versions
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize(("counts", "lengths"), [CASES[1], CASES[3], CASES[5]])
def test_attention_over_8_bits_equals_the_reference(
    counts: list[int], lengths: list[int], rotates: bool, dtype: str
) -> None:
    """With a scale for each number, windows, sinks, and tokens that see later ones. The last bit of a rotated key may round it to the
    next integer, or 8-bit float, whose bits are by one larger."""
    step = Step(counts, lengths, num_tokens=100, num_pages=6, num_rows=4)
    ends = np.concatenate([np.full(count, length) for count, length in zip(counts, lengths, strict=True)])
    padded = np.pad(ends, (0, 100 - step.num_real)).astype(np.int32)
    paging = step.paging._replace(key_ends=jnp.asarray(padded)) if lengths == CASES[3][1] else step.paging
    angles, random = _normal(9, 100, H // 2), np.random.default_rng(1)
    q, k, v = step.tokens()
    k, v = k.at[0, 0, 3].set(jnp.nan).at[0, 0, 4].set(jnp.inf), v.at[0, 1, 5].set(-1e30)
    options = {
        "rotation": Rotation(jnp.cos(angles), jnp.sin(angles)) if rotates else None,
        "scoring": Scoring(SCALE, sliding_window=20),
        "sinks": jnp.asarray(3 * _normal(10, N)),
        "scales": KVScales(*jnp.asarray(random.uniform(0.01, 0.03, (2, K, H)).astype(np.float32))),
    }
    pool, native_pool = _8_bit_pools(dtype)
    expected, *wanted = write_and_attend(q, k, v, *pool, jnp.int32(LAYER), paging, **options)
    out, own_k, own_v = write_and_attend(q, k, v, *native_pool, jnp.int32(LAYER), paging, **options, backend="native")
    real, own_k = step.num_real, np.asarray(own_k).reshape(L, P, K, H, S).swapaxes(3, 4)
    np.testing.assert_allclose(out[:real], expected[:real], atol=0.1 if rotates else 5e-5)
    difference = np.abs(own_k[:, 1:].astype(int) - np.asarray(wanted[0])[:, 1:].astype(int))
    assert difference.max() <= rotates and (difference > 0).mean() < 0.01
    np.testing.assert_array_equal(np.asarray(own_v)[:, 1:], np.asarray(wanted[1])[:, 1:])


def test_8_bit_floats_are_rounded_and_read_as_the_definition_says() -> None:
    """Every number of float16, ties and numbers below the least exponent among them: NaN is stored as 0, infinity as the largest
    number. Then every 8-bit float as the value of a token that sees no other."""
    given = np.arange(1 << 16).astype(np.uint16).view(np.float16).astype(np.float32)
    wanted = np.clip(np.nan_to_num(given), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    rows = len(given) // (2 * K * H)
    k, v = (jnp.asarray(half) for half in given.reshape(2, rows, K, H))
    step = Step([rows], [rows], num_tokens=rows, num_pages=rows // S)
    pool, options = [jnp.zeros((L, P, K, S, H), jnp.uint8)] * 2, {"scoring": Scoring(SCALE), "backend": "native"}
    q = jnp.zeros((rows, N, H))
    _, *own = write_and_attend(q, k, v, *pool, jnp.int32(LAYER), step.paging, **options)
    pages, slots = np.asarray(step.paging.pages), np.asarray(step.paging.slots)
    own_k = np.asarray(own[0]).reshape(L, P, K, H, S)[LAYER, pages, :, :, slots]
    own_v = np.asarray(own[1])[LAYER, pages, :, slots]
    found = np.stack([own_k, own_v]).reshape(-1)
    np.testing.assert_array_equal(np.where(np.isnan(given), found & 0x7F, found), np.where(np.isnan(given), 0, wanted))
    everything = (
        np.delete(np.arange(256), [0x7F, 0xFF]).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    values = np.zeros((rows, K, H), np.float32)
    values.reshape(-1)[: len(everything)] = everything
    step = Step([1] * 4, [1] * 4, num_tokens=4, num_pages=1)
    out, *_ = write_and_attend(
        q[:4], k[:4] * 0, jnp.asarray(values[:4]), *pool, jnp.int32(LAYER), step.paging, **options
    )
    np.testing.assert_array_equal(np.asarray(out)[:, :: N // K].reshape(-1)[: len(everything)], everything)


@pytest.mark.parametrize("window", [None, pytest.param(20, marks=pytest.mark.versions)])
@pytest.mark.parametrize(("counts", "lengths"), CASES)
def test_tokens_of_an_image_see_it_whole(counts: list[int], lengths: list[int], window: int | None) -> None:
    step = Step(counts, lengths, num_tokens=100, num_pages=6, num_rows=4)
    positions = [np.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)]
    ends = [
        np.minimum((own // 37 + 1) * 37, own[-1] + 1) for own in positions
    ]  # images of 37 tokens, the last one short
    padded = np.concatenate([*ends, np.zeros(100 - step.num_real, np.int32)]).astype(np.int32)
    paging = step.paging._replace(key_ends=jnp.asarray(padded))
    options = {"scoring": Scoring(SCALE, sliding_window=window)}
    pool, native_pool = _pools(paging)
    real = slice(step.num_real)
    expected, *_ = write_and_attend(*step.tokens(), *pool, jnp.int32(LAYER), paging, **options)
    out, *_ = write_and_attend(*step.tokens(), *native_pool, jnp.int32(LAYER), paging, **options, backend="native")
    np.testing.assert_allclose(out[real], expected[real], atol=2e-5)
    causal, *_ = write_and_attend(*step.tokens(), *pool, jnp.int32(LAYER), step.paging, **options)
    has_later = padded[real] > np.concatenate(positions) + 1
    assert (np.abs(causal[real] - expected[real]).max((1, 2)) > 1e-3).tolist() == has_later.tolist()


def test_tokens_of_short_rows_are_rows_of_their_own_to_kernels_that_are_causal() -> None:
    """Each sees all keys of its row. Writing alone leaves the pools that writing and attending does."""
    step = Step([1, 5, 9], [40, 5, 30], num_tokens=20, num_pages=3, num_rows=5)
    ends = np.repeat([40, 5, 30], [1, 5, 9])
    paging = step.paging._replace(key_ends=jnp.asarray(np.pad(ends, (0, 20 - step.num_real)).astype(np.int32)))
    angles, scoring = _normal(9, 20, H // 2), Scoring(SCALE)
    rotation = Rotation(jnp.cos(angles), jnp.sin(angles))
    pool, native_pool = _pools(paging)
    q, k, v = step.tokens()
    options = {"scoring": scoring, "rotation": rotation}
    found = {}
    for backend, own in (("reference", pool), ("native", native_pool)):
        whole = write_and_attend(q, k, v, *own, jnp.int32(LAYER), paging, **options, backend=backend)
        found[backend] = whole[0][: step.num_real]
        written = write(k, v, *own, jnp.int32(LAYER), paging, num_heads=N, **options, backend=backend)
        for one, other in zip(written, whole[1:], strict=True):
            np.testing.assert_array_equal(one[:, 1:], other[:, 1:])
    short = write_and_attend(q, k, v, *pool, jnp.int32(LAYER), paging, **options, has_short_rows=True)
    np.testing.assert_allclose(short[0][: step.num_real], found["reference"], atol=2e-5)
    np.testing.assert_allclose(found["native"], found["reference"], atol=2e-5)
    assert not np.asarray(short[0][step.num_real :]).any(), "padding sees nothing"


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8"])
@pytest.mark.parametrize("cuts", [(1, 40, 3, 46), (1, 150, 37, 412)])
def test_a_token_attends_alike_however_its_prompt_was_cut(
    cuts: tuple[int, ...], dtype: str, window: int | None
) -> None:
    """The kernel takes more queries at once in a long chunk, and skips blocks of keys that none of them sees."""
    total = sum(cuts)
    num_pages, options = -(-total // S), {"scoring": Scoring(SCALE, sliding_window=window), "backend": "native"}
    whole = Step([total], [total], num_tokens=total, num_pages=num_pages)
    q, k, v = whole.tokens()
    pool = [jnp.zeros((L, P, K, S, H), dtype)] * 2
    together, *_ = write_and_attend(q, k, v, *pool, jnp.int32(LAYER), whole.paging, **options)
    done = 0
    for count in cuts:
        piece = Step([count], [done + count], num_tokens=count, num_pages=num_pages)
        cut = slice(done, done + count)
        out, *pool = write_and_attend(q[cut], k[cut], v[cut], *pool, jnp.int32(LAYER), piece.paging, **options)
        np.testing.assert_array_equal(out, together[cut])
        done += count


def test_weights_of_attention_are_as_exact_as_their_scores() -> None:
    """A token sees two keys: one with the score 0, and its own with a score between 0 and -80."""
    rows = 20
    step = Step([1] * rows, [2] * rows, num_tokens=rows, num_pages=1)
    scores = -np.linspace(0, 80, rows * N, dtype=np.float32).reshape(rows, N)
    q, one, other = np.zeros((rows, N, H), np.float32), np.zeros((rows, K, H), np.float32), np.zeros(H, np.float32)
    q[:, :, 0], one[:, :, 0], other[1] = scores, 1, 1
    keys, values = jnp.zeros((L, P, K, S, H)), jnp.broadcast_to(other, (L, P, K, S, H))
    given = [jnp.asarray(each) for each in (q, one, one)]
    out, *_ = write_and_attend(
        *given, keys, values, jnp.int32(LAYER), step.paging, scoring=Scoring(1.0), backend="native"
    )
    found = np.asarray(out[..., 0], np.float64) / np.asarray(out[..., 1])
    limit = 4e-7 + 1.5e-7 * np.abs(scores)  # of the weight; of the score, which is rounded twice as an exponent of 2
    assert (np.abs(found / np.exp(scores.astype(np.float64)) - 1) <= limit).all()


@pytest.mark.versions
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_native_attention_writes_the_pool_in_place(tokens: int) -> None:
    step = Step([1] * min(tokens, 6), [9] * min(tokens, 6), num_tokens=tokens, num_pages=2)
    k, v = (jnp.zeros((L, P, K, S, H)) for _ in range(2))

    def attend(k_pages: jax.Array, v_pages: jax.Array, q: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        for layer in range(L):
            q, k_pages, v_pages = write_and_attend(
                q, key, key, k_pages, v_pages, jnp.int32(layer), step.paging, scoring=Scoring(SCALE), backend="native"
            )
        return k_pages, v_pages, q

    query, key, _ = step.tokens()
    memory = jax.jit(attend, donate_argnums=(0, 1)).lower(k, v, query, key).compile().memory_analysis()
    assert memory.alias_size_in_bytes == k.nbytes + v.nbytes
    assert memory.temp_size_in_bytes < k.nbytes / L
