"""A KV pool of more than 2^31 numbers: its last pages are written and read where they are, and no others.

The pool takes gigabytes of addresses, and memory for the pages that are touched only.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention import Paging, Scoring, write_and_attend
from jaxtyping import Array, Float

L, K, S, H, N = 2, 2, 16, 64, 4
ROWS, LENGTH = 2, 20
PAGES_PER_ROW = -(-LENGTH // S)
LARGE = 2**31 // (L * K * S * H) + 8
"""Pages: both arrays of the pool have more numbers than an int32 counts, and the last layer begins at 2^30."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.register() is None, reason="needs the native library")]


def _generated(num_pages: int, first: int, backend: Backend) -> tuple[Float[Array, "T B N H"], list[Array]]:
    """Return the outputs of decode steps whose rows have the pages from `first` on, and those pages after the last step."""
    shape = jax.ShapeDtypeStruct((L, num_pages, K, S, H), jnp.int8)
    pools = jax.jit(lambda: tuple(native.untouched_zeros(shape, shape)))()
    scales = KVScales(jnp.full((K, 1), 0.02), jnp.full((K, 1), 0.03))
    step = functools.partial(write_and_attend, scoring=Scoring(0.1), scales=scales, backend=backend)
    compiled = jax.jit(step, donate_argnums=(3, 4))
    tables = first + jnp.arange(ROWS * PAGES_PER_ROW, dtype=jnp.int32).reshape(ROWS, PAGES_PER_ROW)
    random, outputs = np.random.default_rng(0), []
    for position in range(LENGTH):
        q, k, v = (jnp.asarray(random.standard_normal((ROWS, heads, H)), jnp.float32) for heads in (N, K, K))
        lengths, slots = jnp.full(ROWS, position + 1), jnp.full(ROWS, position % S)
        paging = Paging(tables, lengths, jnp.arange(ROWS + 1), tables[:, position // S], slots, None)
        out, *pools = compiled(q, k, v, *pools, jnp.int32(L - 1), paging)
        outputs.append(out)
    return jnp.stack(outputs), [jax.lax.slice_in_dim(pool, first, first + tables.size, axis=1) for pool in pools]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_the_last_pages_of_a_large_pool_are_those_of_a_small_one(backend: Backend) -> None:
    used = ROWS * PAGES_PER_ROW
    expected, pages = _generated(1 + used, 1, backend)
    found, last = _generated(LARGE, LARGE - used, backend)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    for own, other in zip(last, pages, strict=True):
        assert np.asarray(own).tobytes() == np.asarray(other).tobytes() and np.asarray(own)[L - 1].any()
