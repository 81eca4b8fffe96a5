"""A cache of e4m3 as CPUs keep it, in bytes: XLA computes what it computes with a pool of e4m3, and converts no pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import latent_attention, paged_attention
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention import Paging, Scoring, ragged_layout

pytestmark = pytest.mark.slow
L, P, S, T, ROWS = 2, 12, 16, 25, 3
SCALES = KVScales(jnp.asarray([0.02, 0.5]), jnp.asarray([0.03, 2.0]))
LENGTHS, STARTS = (40, 1, 30), (0, 1, 2, T)
"""A decode step of a long row, the first token of another, and the rest of a prompt."""


def paging() -> Paging:
    tables = 1 + np.arange(ROWS * 3).reshape(ROWS, 3)
    places = [
        (tables[row, position // S], position % S)
        for row, length in enumerate(LENGTHS)
        for position in range(length - (STARTS[row + 1] - STARTS[row]), length)
    ]
    pages, slots = (jnp.asarray(each) for each in zip(*places, strict=True))
    starts = jnp.asarray(STARTS)
    ragged = ragged_layout(starts, jnp.int32(2), num_tokens=T)
    return Paging(jnp.asarray(tables), jnp.asarray(LENGTHS), starts, pages, slots, ragged)


def step(op: str, pool_shape: tuple[int, ...], dtype: str) -> tuple[Any, list[jax.Array]]:
    """Return a function of pools that computes a step of `op`, and random pools."""
    random = np.random.default_rng(0)
    numbers = jnp.asarray(random.standard_normal((2, *pool_shape)) * 30, jnp.float8_e4m3fn)
    pools = list(jax.lax.bitcast_convert_type(numbers, jnp.dtype(dtype)))
    q, k, v = (jnp.asarray(random.standard_normal((T, heads, 32)) * 30, jnp.float32) for heads in (4, 2, 2))
    if op == "latent":
        given = (q, k[:, :1]), {"value_width": 16, "scoring": Scoring(0.01)}
        attend, pools = latent_attention.write_and_attend, pools[:1]
    else:
        given = (q, k, v), {"scales": SCALES, "scoring": Scoring(0.01, softcap=20.0)}
        attend = paged_attention.write_and_attend
    operands, options = given
    return (lambda *own: attend(*operands, *own, jnp.int32(1), paging(), **options)), pools


@pytest.mark.parametrize(("op", "heads"), [("paged", 2), ("latent", 1)])
def test_bytes_give_the_bits_of_e4m3(op: str, heads: int) -> None:
    found = []
    for dtype in ("uint8", "float8_e4m3fn"):
        run, pools = step(op, (L, P, heads, S, 32), dtype)
        out, *written = jax.jit(run)(*pools)
        found.append([np.asarray(out), *(np.asarray(each).view(np.uint8) for each in written)])
    for own, wanted in zip(*found, strict=True):
        np.testing.assert_array_equal(own, wanted)
    assert np.isfinite(found[0][0]).all() and found[0][0].any()


@pytest.mark.parametrize(("op", "heads"), [("paged", 2), ("latent", 1)])
def test_a_step_converts_no_pool(op: str, heads: int) -> None:
    """Memory beside the pools is less than one of them."""
    run, pools = step(op, (L, 4000, heads, S, 32), "uint8")
    compiled = jax.jit(run, donate_argnums=range(len(pools))).lower(*pools).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools[0].nbytes
