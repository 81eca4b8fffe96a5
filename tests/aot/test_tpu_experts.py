"""Products with the weights of experts for TPUs: interpreted against float64, and compiled without a TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve_kernels.grouped_matmul import grouped_matmul, tpu
from jaxserve_kernels.grouped_matmul.cases import TOLERANCES, Case, expected, operands

from tests.aot.devices import V5E, V6E, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow]


@pytest.mark.parametrize("case", [Case((3, 0, 1, 4), 128, 256, padding=8), Case((0, 17, 130), 128, 128)], ids=str)
def test_the_kernel_for_tpus_equals_the_product_in_float64(case: Case) -> None:
    x, weight, group_sizes, _ = operands(case)
    wanted, sizes = expected(case, operands(case))
    out = tpu.grouped_matmul(*map(jnp.asarray, (x, weight, group_sizes)), is_emulated=True)
    found = np.asarray(out, np.float64)[: len(wanted)]
    assert (np.abs(found - wanted) <= TOLERANCES[case.dtype] * sizes).all()


@pytest.mark.parametrize("target", [V5E, V6E], ids=lambda target: target.name)
def test_weights_are_read_where_they_are(target: Target) -> None:
    if not target.has_compiler:
        pytest.skip(f"{target.compiler} is not installed: nothing compiled for {target.name} (make kernels-check)")
    mesh = Mesh(np.array(target.devices(1)), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = ((256, 2048), "bfloat16"), ((128, 1536, 2048), "bfloat16"), ((128,), "int32")
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(name), sharding=sharding) for shape, name in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(lambda *each: grouped_matmul(*each, backend="mosaic_tpu")).lower(*arrays).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert "tpu_custom_call" in (text or "")
    assert memory.temp_size_in_bytes < 16 << 20
