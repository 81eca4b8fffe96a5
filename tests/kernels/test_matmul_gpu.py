"""Matmuls with 8-bit weights by the kernel for Hopper: interpreted, and its choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.matmul import gpu, matmul, tuning
from jaxserve_kernels.matmul.cases import CASES, ROUNDED_CASES, Case, error, operands
from jaxserve_kernels.matmul.tuning import SkinnyTuning

from tests.kernels.gpu_interpreter import gpu_interpreter


@pytest.mark.parametrize(("case", "rows"), [*((case, 64) for case in ROUNDED_CASES), (CASES[0], 128)], ids=str)
def test_the_kernel_for_hopper_equals_the_matmul_in_float64_without_a_race(case: Case, rows: int) -> None:
    """Beside what `test_conformance` runs: rounded activations, and blocks of 128 outputs."""
    sizes, given = SkinnyTuning(rows=rows, tile=128, stages=2, programs=3), operands(case)
    x, weight, scales = map(jnp.asarray, given)
    with gpu_interpreter() as has_raced:
        assert gpu.supports(x, weight, sizes)
        from jaxserve_kernels.matmul.gpu import skinny

        out = jax.block_until_ready(skinny.matmul(x, weight, tuning=sizes, is_emulated=True))
        assert not has_raced()
    assert error(case, given, out * scales) <= 1


def test_activations_are_quantised_as_the_reference_does_it() -> None:
    random = np.random.default_rng(0)
    x, (_, weight, scales) = random.standard_normal((3, 128), np.float32), map(jnp.asarray, operands(Case(1, 128, 128)))
    sizes = SkinnyTuning(rows=64, tile=128, stages=2, programs=1)
    with gpu_interpreter():
        from jaxserve_kernels.matmul.gpu import skinny

        out = skinny.scaled_matmul(jnp.asarray(x), weight, scales, dynamic=True, tuning=sizes, is_emulated=True)
        out = jax.block_until_ready(out)
    np.testing.assert_allclose(out, matmul(jnp.asarray(x), weight, scales, dynamic=True), rtol=1e-6)


def _choice(x: tuple[int, int], weight: tuple[int, int], dtype: str = "bfloat16") -> SkinnyTuning | None:
    return gpu.choice(jax.ShapeDtypeStruct(x, jnp.dtype(dtype)), jax.ShapeDtypeStruct(weight, jnp.dtype("int8")))


def test_a_shape_without_a_measurement_is_left_to_xla() -> None:
    assert tuning.skinny_tuning("h200", "int2", 8, 1 << 24) is None
    assert tuning.skinny_tuning("h200", "int8", 100_000, 1 << 24) is None


def test_the_kernel_is_taken_for_shapes_where_it_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"rows": 64, "tile": 128, "stages": 4, "programs": 132}
    monkeypatch.setattr(tuning, "load", lambda device: {"int8": {"32": {"2": sizes}}})
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    assert _choice((20, 1024), (3072, 1024)) == SkinnyTuning(**sizes)
    assert _choice((8, 1024), (3072, 1024)) is None, "another class of tokens"
    assert _choice((20, 1024), (4096, 1024)) is None, "another class of sizes"
    assert _choice((20, 1024), (3072, 1024), "float32") is None
    operands = jax.ShapeDtypeStruct((20, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((3072, 1024), jnp.int8)
    assert gpu.choice(*operands, dynamic=True) is None, "another op"
    assert _choice((20, 1024), (3072 - 64, 1024)) is None
    assert _choice((20, 1024 - 64), (3072, 1024 - 64)) is None


def test_under_a_mesh_of_several_devices_xla_computes_the_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"rows": 64, "tile": 128, "stages": 4, "programs": 132}
    monkeypatch.setattr(tuning, "load", lambda device: {"int8": {"32": {"2": sizes}}})
    monkeypatch.setattr(gpu, "FIRST_JAX", (0, 0, 0))
    for size, is_taken in ((1, True), (2, False)):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((size,), ("tensor",))):
            assert (_choice((20, 1024), (3072, 1024)) is not None) == is_taken


def test_sizes_are_classed_by_powers_of_two() -> None:
    mib = 1 << 20
    assert [tuning.size_class(each) for each in (1, mib, 3 * mib, 16 * mib, 56 * mib)] == ["1", "1", "2", "16", "32"]
