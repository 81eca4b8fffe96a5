"""The TPU kernel for 8- and 4-bit weights of experts, interpreted on the CPU with its race detector, against float64.

The kernel's own memory begins as NaN, and so do unwritten results.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.grouped_matmul import grouped_matmul, tpu
from jaxserve_kernels.grouped_matmul.cases import CASES, Case, Operands, error, operands
from jaxserve_kernels.grouped_matmul.tpu import SmallTuning
from jaxserve_kernels.matmul import matmul, quantize_rows
from jaxserve_kernels.matmul import tpu as dense

from tests.kernels.tpu_interpreter import QUICKLY, tpu_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.newest]

SMALL = SmallTuning(rows=32, outputs=128, inputs=128)
IN_CI = (
    Case((0, 9, 2, 0, 40), 192, 256, weights="int8", padding=5),
    Case((3, 0, 1), 128, 256, weights="int4", padding=3),
    Case((3, 0, 1), 128, 256, weights="e4m3_groups", group=128, padding=3),
    Case((3, 0, 1), 128, 256, weights="mxfp4", group=32, padding=3),
    Case((2, 0, 33), 128, 192, weights="mxfp4", group=32, padding=1),  # turned
)
MORE = (
    *(case for case in CASES if case.weights in ("int8", "float8_e4m3fn", "int4")),
    Case(
        (0, 5, 1), 192, 720, weights="mxfp4", group=16
    ),  # a quarter of gpt-oss: in two pieces, the last lanes part full
    Case((1, 0, 0, 70, 1), 256, 192, weights="float8_e4m3fn"),  # turned
    Case((2, 0, 33), 128, 192, weights="int4", group=32, padding=1),  # turned, the last lanes half full
    Case((0, 5), 192, 1088, weights="int4"),  # all inputs at once, in three pieces
    Case((2, 0, 33), 128, 192, weights="e4m3_groups", group=64, padding=1),  # turned
    Case((0,) * 9 + (4, 1), 128, 128, weights="int8"),  # scales of experts in two tiles of memory
)


def multiply(case: Case, given: Operands, monkeypatch: pytest.MonkeyPatch, *, dynamic: bool = False) -> np.ndarray:
    """With small tiles, so that few rows and outputs are several, and steps along the inputs where they divide."""
    inputs = case.num_inputs if case.num_inputs % SMALL.inputs else SMALL.inputs
    sizes = SmallTuning(SMALL.rows, SMALL.outputs, inputs)
    monkeypatch.setattr(tpu, "small_choice", lambda *_: sizes)
    multiply = functools.partial(grouped_matmul, dynamic=dynamic, backend="mosaic_tpu")
    with tpu_interpreter(num_cores=1):
        arrays = [jnp.asarray(each) for each in given]
        out = jax.block_until_ready(jax.jit(multiply, compiler_options=QUICKLY)(*arrays))
    return np.asarray(out, np.float64)


@pytest.mark.parametrize(
    "case", [*IN_CI, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE)], ids=str
)
def test_the_kernel_equals_the_matmul_in_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(case)
    assert error(case, given, multiply(case, given, monkeypatch)) <= 1


@pytest.mark.parametrize("weights", ["int8", "float8_e4m3fn"])
def test_rounded_activations_meet_small_weights_as_they_are(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((0, 9, 2, 0), 128, 256, weights=weights)
    given = operands(case)
    assert given.scales is not None
    found = multiply(case, given, monkeypatch, dynamic=True)
    rounded, row_scales = (
        np.asarray(each, np.float64) for each in quantize_rows(jnp.asarray(given.x), given.weight.dtype)
    )
    experts = np.repeat(np.arange(len(given.weight)), given.group_sizes)
    wide = given.weight.astype(np.float64)[experts] * given.scales.astype(np.float64)[experts][:, :, None]
    wanted = np.einsum("ri,roi->ro", rounded * row_scales[:, None], wide)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the rows of one expert among other experts, in another place of another tile."""
    case = Case((64, 0, 0), 128, 128, weights="int4")
    given = operands(case)
    assert given.scales is not None
    given = given._replace(scales=np.nan_to_num(given.scales, nan=0.5))
    found = []
    for sizes in ((0, 5, 59), (41, 23, 0)):
        first = sizes[0] + min(sizes[1] - 5, 3)
        rows = np.concatenate((given.x[5 : 5 + first], given.x[:5], given.x[5 + first :]))
        moved = given._replace(x=rows, group_sizes=np.array(sizes, np.int32))
        found.append(multiply(case, moved, monkeypatch)[first : first + 5])
    np.testing.assert_array_equal(*found)


def test_one_matrix_is_that_of_the_only_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens take the kernel; a mesh that XLA splits the matmul over does not."""
    case = Case((5,), 192, 256, weights="e4m3_groups", group=128)
    given = operands(case)
    assert given.scales is not None
    monkeypatch.setattr(tpu, "small_choice", lambda *_: SMALL)
    arrays = [jnp.asarray(each) for each in (given.x, given.weight[0], given.scales[0])]
    multiply = jax.jit(functools.partial(matmul, backend="mosaic_tpu"), compiler_options=QUICKLY)
    assert "grouped_matmul" in str(jax.make_jaxpr(functools.partial(matmul, backend="mosaic_tpu"))(*arrays))
    with tpu_interpreter(num_cores=1):
        assert error(case, given, jax.block_until_ready(multiply(*arrays))) <= 1
    many = [jnp.zeros((257, 256), jnp.bfloat16), *arrays[1:]]
    assert not dense.supports(*many)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        assert not dense.supports(*arrays)


def test_a_step_of_padding_alone_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((0, 0), 128, 128, weights="int8", padding=8)
    assert multiply(case, operands(case), monkeypatch).shape == (8, 128)


def _choice(weights: str, outputs_by_inputs: tuple[int, int], group: int = 0, **types: str) -> SmallTuning | None:
    num_outputs, num_inputs = outputs_by_inputs
    scales = (
        ((8, num_inputs // group, num_outputs), types.get("scales", "bfloat16"))
        if group
        else ((8, num_outputs), "float32")
    )
    arrays = ((64, num_inputs), types.get("x", "bfloat16")), ((8, num_outputs, num_inputs), weights), scales
    return tpu.small_choice(*(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in arrays))


def test_a_step_has_all_inputs_or_a_part_that_divides_them() -> None:
    taken = {
        ("int8", (2048, 768), 0): 768,
        ("float8_e4m3fn", (2880, 2880), 0): 2880,
        ("int8", (4096, 14336), 0): 2048,
        ("int8", (4096, 3584), 0): 1792,
        ("int4", (4096, 3584), 128): 3584,
        ("int4", (4096, 14336), 128): 2048,
        ("int4", (2048, 192), 64): 192,
        ("int4", (2880, 2880), 32): 2880,
        ("float8_e4m3fn", (4096, 7168), 128): 1024,
        ("float8_e4m3fn", (7168, 2048), 128): 2048,
    }
    for (weights, shape, group), inputs in taken.items():
        sizes = _choice(weights, shape, group, scales="bfloat16" if weights == "int4" else "float32")
        assert sizes is not None, shape
        assert sizes.inputs == inputs
    assert _choice("int8", (4096, 14336 + 64)) is None, "no whole lanes divide it"
    assert _choice("int4", (4096, 7 * 1024 + 512), 128) is None, "nor rows of scales"
    assert _choice("int4", (4096, 4096), 256) is None
    assert _choice("int8", (4096, 4096), 128) is None, "4 bits in bytes"
    assert _choice("float8_e4m3fn", (4096, 4096), 128) is None, "scales are float32"
    assert _choice("int8", (4096, 4096), x="float32") is None
    assert _choice("int4", (2880, 720), 16) is None, "too few inputs of a scale"
    assert _choice("int4", (2880, 720), 16, scales="uint8") is not None, "of an exponent"
