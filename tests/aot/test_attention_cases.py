"""The kernels for Hopper, compiled for an H200: what the interpreter takes and a compiler may refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from jaxserve_kernels.paged_attention import mixed_attention, ragged_layout
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, Case, operands

from tests.aot.devices import H200

pytestmark = [pytest.mark.aot, pytest.mark.slow]

UNEVEN = [case for case in CASES if not case.is_decode and (sum(case.counts) + case.padding) % 8][:2]


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_any_number_of_tokens_compiles(case: Case) -> None:
    """Memory is copied in whole tiles of eight rows."""
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for an H200 (make kernels-check)")
    given = operands(case)
    (device,) = H200.devices(1)
    sharding = SingleDeviceSharding(device)
    arrays = (given.q, given.k_pages, given.v_pages, given.tables, given.lengths, given.query_starts)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, lengths: jax.Array, starts: jax.Array
    ) -> jax.Array:
        num_decode_rows = jnp.int32(case.num_decode_rows)
        ragged = ragged_layout(starts, num_decode_rows, num_tokens=q.shape[0], backend="mosaic_gpu")
        pool = (k, v, jnp.int32(LAYER), tables, lengths)
        return mixed_attention(q, *pool, ragged, scoring=case.scoring, backend="mosaic_gpu")

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in arrays]
    with jax.default_device(device):
        text = jax.jit(attend).lower(*shapes).compile().as_text()
    assert "mosaic_gpu" in (text or "")
